"""Work that would hold up a router's event loop, done beside it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class OffLoop:
    """A thread for long work, one piece at a time: all threads of a process share one interpreter
    with its event loop, which many at once would leave little of."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="off-loop")

    async def __call__(
        self, work: Callable[P, R], is_long: bool, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """The result of `work`, which runs in the thread if it `is_long`.

        Whoever is cancelled meanwhile ends at once; work that has begun goes on to its end.
        """
        if not is_long:
            return work(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, partial(work, *args, **kwargs))
