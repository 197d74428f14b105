"""A thread for a worker: what lives there is reached from other event loops, and holds none up."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
ArgsT = TypeVarTuple("ArgsT")


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
        self._events.run_forever()
        self._events.close()
