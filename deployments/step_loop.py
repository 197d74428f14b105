"""One thread that steps a worker, and the callers that wait for its answers.

This is where the calls of all routers meet: whatever arrived while a step ran is merged into the
next one. (`@serve.batch` would close batches before they run and fragment them.)
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from workers.errors import TandemError
from workers.types import WorkRequest, WorkResult

if TYPE_CHECKING:
    from workers.step_worker import StepWorker

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=WorkRequest)
ResultT = TypeVar("ResultT", bound=WorkResult)

SWEEP_S = 5.0
# A call that waits longer, for room or in a long prefill, is told so; its caller asks again and
# knows that the worker is alive.
LONGEST_WAIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a worker has done since its start."""

    num_steps: int = 0
    """Of the model."""
    num_tokens: int = 0
    """Run in them."""
    busy_s: float = 0.0
    """Spent in them."""


class StepLoop(Generic[RequestT, ResultT]):
    """Serves concurrent callers from one StepWorker."""

    def __init__(
        self,
        make_worker: "Callable[[], StepWorker[RequestT, ResultT]]",
        *,
        idle_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Make the worker on the loop's own thread; blocks until it is there.

        Args:
            idle_timeout_s: sequences not asked for in this time are forgotten, so that those of
                a lost router do not stay; one that lives sends its tokens again.
        """
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step")
        self._worker = self._thread.submit(make_worker).result()
        self._idle_timeout_s = idle_timeout_s
        self._clock = clock
        self._inbox: dict[str, RequestT] = {}
        self._to_release: list[str] = []
        self._to_give_back: list[str] = []
        self._waiting: dict[str, asyncio.Future[ResultT]] = {}
        self._last_used: dict[str, float] = {}
        self._wake_up = asyncio.Event()
        self._task = asyncio.create_task(self._run())
        self._sweeper = asyncio.create_task(self._sweep())
        self.work = Work()

    @property
    def worker(self) -> "StepWorker[RequestT, ResultT]":
        return self._worker

    @property
    def failure(self) -> BaseException | None:
        """Why the loop has ended, if it has."""
        return self._task.exception() if self._task.done() else None

    async def run_batch(self, batch: Sequence[RequestT]) -> tuple[ResultT, ...]:
        """The results of a batch, in its order.

        Cancelling the call releases its sequences: their caller has given them up.
        """
        if (failure := self.failure) is not None:
            raise RuntimeError("the worker has failed") from failure
        futures = [self._enqueue(request) for request in batch]
        try:
            return tuple(await asyncio.gather(*futures))
        except asyncio.CancelledError:
            self.release([request.seq_id for request in batch])
            raise

    def release(self, seq_ids: Iterable[str]) -> None:
        """Forget sequences before the next step."""
        for seq_id in seq_ids:
            self._to_release.append(seq_id)
            self._inbox.pop(seq_id, None)
            self._last_used.pop(seq_id, None)
            self._resolve(self._worker.unanswered(seq_id, is_released=True))
        self._wake_up.set()

    async def close(self) -> None:
        """Stop stepping; calls that wait are cancelled."""
        self._task.cancel()
        self._sweeper.cancel()
        for future in self._waiting.values():
            future.cancel()
        await asyncio.gather(self._task, self._sweeper, return_exceptions=True)
        self._thread.shutdown()

    def _enqueue(self, request: RequestT) -> asyncio.Future[ResultT]:
        seq_id = request.seq_id
        self._resolve(self._worker.unanswered(seq_id, is_released=True))
        future: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._waiting[seq_id] = future
        self._inbox[seq_id] = request
        self._last_used[seq_id] = self._clock()
        self._wake_up.set()
        return future

    def _resolve(self, result: ResultT) -> None:
        future = self._waiting.pop(result.seq_id, None)
        if future is not None and not future.done():
            future.set_result(result)

    def _refuse(self, seq_id: str, error: TandemError) -> None:
        future = self._waiting.pop(seq_id, None)
        if future is not None and not future.done():
            future.set_exception(error)

    async def _run(self) -> None:
        try:
            while True:
                await self._wake_up.wait()
                self._wake_up.clear()
                while await self._turn():
                    pass
        except Exception as error:
            logger.exception("the worker has failed")
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(RuntimeError(f"the worker has failed: {error}"))
            self._waiting.clear()
            raise

    async def _turn(self) -> bool:
        """Hand over what has arrived and run a step; whether another may follow at once."""
        inbox, self._inbox = self._inbox, {}
        to_release, self._to_release = self._to_release, []
        to_give_back, self._to_give_back = self._to_give_back, []
        results, errors, has_run = await asyncio.get_running_loop().run_in_executor(
            self._thread, self._step, inbox, to_release, to_give_back
        )
        for result in results:
            self._resolve(result)
        for seq_id, error in errors.items():
            self._refuse(seq_id, error)
        # answers without a step may let others in; with neither, only a new call helps
        return has_run or bool(results) or bool(self._inbox) or bool(self._to_release)

    def _step(
        self, inbox: dict[str, RequestT], to_release: list[str], to_give_back: list[str]
    ) -> tuple[list[ResultT], dict[str, TandemError], bool]:
        """On the worker's thread. Releases come first: a caller may ask again at once."""
        started = time.perf_counter()
        self._worker.release(to_release)
        results, errors = self._worker.give_back(to_give_back), {}
        for request in inbox.values():
            try:
                answers = self._worker.submit(request)
            except TandemError as error:
                errors[request.seq_id] = error
                continue
            # a released one is the answer to an earlier request, which is resolved already
            results += [answer for answer in answers if not answer.is_released]
        answers, has_run = self._worker.step()
        self.work = Work(
            num_steps=self.work.num_steps + has_run,
            num_tokens=self._worker.num_tokens_run,
            busy_s=self.work.busy_s + time.perf_counter() - started,
        )
        return results + answers, errors, has_run

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now = self._clock()
            ages = {seq_id: now - used for seq_id, used in self._last_used.items()}
            self._to_give_back += [
                seq_id
                for seq_id, age_s in ages.items()
                if age_s > LONGEST_WAIT_S and seq_id in self._waiting
            ]
            self.release(
                [
                    seq_id
                    for seq_id, age_s in ages.items()
                    if age_s > self._idle_timeout_s and seq_id not in self._waiting
                ]
            )
