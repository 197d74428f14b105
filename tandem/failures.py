"""Why an app could not start, in one sentence, out of what Serve says of it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from workers import errors
from workers.errors import ConfigError

# The last line of a traceback: where the error's class is from, its name, what it says.
ERROR_LINE = re.compile(
    r"^(?:[\w.]+\.)?(?P<name>\w*(?:Error|Exception)): (?P<text>.+)$", re.MULTILINE
)
CONFIG_ERRORS = frozenset(
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, ConfigError)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The reason why an app cannot start."""

    sentence: str
    is_final: bool
    """Whether another try would end alike."""


def find_failure(messages: Sequence[str]) -> Failure | None:
    """The failure that Serve's messages tell of, if they tell of one.

    Args:
        messages: of the deployments and the app, with the tracebacks of replicas that have failed
            to start.
    """
    found = [match for message in messages for match in ERROR_LINE.finditer(message)]
    for match in found:
        if match["name"] in CONFIG_ERRORS:
            return Failure(sentence=match["text"], is_final=True)
    if found:
        last = found[-1]
        return Failure(sentence=f"{last['name']}: {last['text']}", is_final=False)
    return None
