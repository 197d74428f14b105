"""A thread for a worker: what lives there is reached from other event loops, and holds none up."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
ArgsT = TypeVarTuple("ArgsT")

NICENESS = 3
"""How much nicer steps are than the routers and Serve's proxies beside them. On shared cores what a
new request needs of those is short, and must not wait for steps, which are long. From Ray's default
of 15 this leaves a compilation, at 19, behind the steps."""


class StepThread:
    """A thread with an event loop of its own.

    A StepLoop lives there, and so do the streams to it: to change threads costs a call more than
    its messages do.
    """

    def __init__(self) -> None:
        self._events = asyncio.new_event_loop()
        threading.Thread(target=self._live, name="step", daemon=True).start()

    async def make(self, make: Callable[[], T]) -> T:
        """Make what is to live on the thread, which ends if that fails."""

        async def there() -> T:
            return make()

        try:
            return await self.run(there())
        except BaseException:
            self.stop()
            raise

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work on the thread; cancelling the call cancels it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._events))

    def call_soon(self, function: Callable[[*ArgsT], object], *args: *ArgsT) -> None:
        """Call a function on the thread, soon."""
        self._events.call_soon_threadsafe(function, *args)

    def stop(self) -> None:
        """End the thread; what still runs there is lost."""
        self._events.call_soon_threadsafe(self._events.stop)

    def _live(self) -> None:
        os.nice(NICENESS)  # of this thread and of those that it starts, not of the process
        self._events.run_forever()
        self._events.close()
