"""How a start that cannot be says so, to whoever has asked for it."""

from collections.abc import Iterator
from contextlib import contextmanager

import click
import ray
from ray.serve.exceptions import RayServeException

from workers.errors import TandemError


@contextmanager
def refused_in_a_sentence() -> Iterator[None]:
    """Raise a TandemError of the block as what its caller shows without a traceback.

    `serve run` is a command of click, which ends with the sentence and status 1. Of a config file,
    Serve builds the app in a task of Ray, and shows the sentence as the app's status. Any other
    caller gets the error itself.
    """
    try:
        yield
    except TandemError as error:
        if click.get_current_context(silent=True) is not None:
            raise click.ClickException(str(error)) from None
        if _is_in_a_task():
            raise RayServeException(str(error)) from None
        raise


def _is_in_a_task() -> bool:
    return ray.is_initialized() and ray.get_runtime_context().get_task_id() is not None
