"""Work in the background that belongs to no request."""

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class BackgroundTasks:
    """Tasks that are kept until they end, each in a context of its own.

    A round, a release or a drafter's call may be started by a request's task and serve many
    others. Under that task's context, Serve would give all calls of it that request's id, confuse
    those that run at a time, and cancel them when that one client leaves.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        """Run `work` until it ends or is cancelled; the task brings its result."""
        task = asyncio.create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancel what still runs, and wait until it has ended."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
