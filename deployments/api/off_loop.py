"""Work that would hold up an event loop, done beside it."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


async def off_loop(work: Callable[P, R], is_long: bool, *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of `work`, which runs in a thread if it `is_long`, so that no other request waits
    for it. Whoever is cancelled meanwhile ends at once; the thread ends when the work is done."""
    return await asyncio.to_thread(work, *args, **kwargs) if is_long else work(*args, **kwargs)
