"""One event loop that steps a worker, and the callers that wait for its answers.

This is where the calls of all routers meet: whatever arrived while a step ran is merged into the
next one. (`@serve.batch` would close batches before they run and fragment them.)
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from deployments.replicas.background_timing import BackgroundTiming
from deployments.replicas.calls import Call, Work
from deployments.replicas.rejoin_wait import RejoinWait
from workers.errors import WorkerFailedError, WorkerLostError
from workers.types import Reply, WorkRequest, WorkResult

if TYPE_CHECKING:
    from workers.step_worker import StepWorker

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=WorkRequest)
ResultT = TypeVar("ResultT", bound=WorkResult)

SWEEP_S = 5.0
# A call that waits longer, for room or in a long prefill, is told so; its caller asks again and
# knows that the worker is alive.
LONGEST_WAIT_S = 20.0


class StepLoop(Generic[RequestT, ResultT]):
    """Serves concurrent callers from one StepWorker.

    Steps run on the event loop that it is made in and hold it up: while one runs, nothing could be
    answered anyway. What comes meanwhile is heard before the next.
    """

    def __init__(
        self,
        make_worker: "Callable[[], StepWorker[RequestT, ResultT]]",
        *,
        idle_timeout_s: float,
        clock: Callable[[], float],
        replica_id: str = "",
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        """Make the worker; blocks until it is there.

        Args:
            idle_timeout_s: sequences not asked for in this time are forgotten, so that those of
                a lost router do not stay; one that lives sends its tokens again.
            replica_id: who answers, by its replies.
            on_failure: told why the worker can go on no more, once every call is answered so.
        """
        self._worker = make_worker()
        self._idle_timeout_s = idle_timeout_s
        self._clock = clock
        self._replica_id = replica_id
        self._on_failure = on_failure
        self._submit_error: Exception | None = None
        """Why the worker could not take a request, if that has happened."""
        self._waiting: dict[str, Call[RequestT, ResultT]] = {}
        self._last_used: dict[str, float] = {}
        self.work = Work()
        self._work_at_last_poll = self.work
        """The counters when the event loop last accepted calls: one that arrives now has been
        queued since then."""
        self._answered: set[str] = set()
        """Sequences answered since the last step began, and not released: a call for them cannot
        have waited for it."""
        self._rejoin_wait = RejoinWait()
        self._last_step_s = 0.0
        self._last_step_ended = 0.0
        self._is_between_steps = True
        """True while no step runs: a call that arrives now was made now, not queued in a step."""
        self._step_began: float | None = None
        self._timing = BackgroundTiming(self._worker.step_table)
        self._wake_up = asyncio.Event()
        events = asyncio.get_running_loop()

        def wake_up() -> None:
            events.call_soon_threadsafe(self._wake_up.set)

        self._worker.on_grammar_ready(wake_up)
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._end)
        self._sweeper = asyncio.create_task(self._sweep())

    @property
    def worker(self) -> "StepWorker[RequestT, ResultT]":
        return self._worker

    @property
    def step_s(self) -> float:
        """How long the step that runs now has taken; read from other threads."""
        began = self._step_began
        return 0.0 if began is None else time.perf_counter() - began

    @property
    def failure(self) -> BaseException | None:
        """Why the loop has ended, if it has."""
        if not self._task.done():
            return None
        return RuntimeError("it is closed") if self._task.cancelled() else self._task.exception()

    def submit(
        self, batch: Sequence[RequestT], answer: Callable[[Reply[ResultT] | Exception], None]
    ) -> None:
        """Have a batch served from the next step on, the results in its order.

        `answer` is called as soon as they are there, or one has failed: within the turn, and not
        by way of a future, so that the answer leaves at once. Who gives a call up has to `release`.
        """
        if (failure := self.failure) is not None:
            answer(self._loss(failure))
            return
        has_waited = self._answered.isdisjoint(request.seq_id for request in batch)
        before = self._work_at_last_poll if has_waited else self.work
        if self._is_between_steps and not has_waited:
            self._rejoin_wait.observe(self._clock() - self._last_step_ended)
        call = Call(batch=batch, answer=answer, before=before, num_missing=len(batch))
        now = self._clock()
        for request in batch:
            self._settle_released(request.seq_id)
            self._waiting[request.seq_id] = call
            self._last_used[request.seq_id] = now
            for result in self._submit(request):
                if not result.is_released:  # else of an earlier request, which is answered already
                    self._settle(result)
        if not batch:
            self._answer(call, self._reply(call))
        self._wake_up.set()

    def _submit(self, request: RequestT) -> list[ResultT]:
        """Hand a request to the worker; if that raises, as when a device is lost, the loop ends by
        it, which answers all calls. What a request itself can cause is a result."""
        try:
            return self._worker.submit(request)
        except Exception as error:
            self._submit_error = error
            return []

    def release(self, seq_ids: Iterable[str]) -> None:
        """Forget sequences; calls that wait for them are answered so."""
        for seq_id in seq_ids:
            self._worker.release([seq_id])
            self._last_used.pop(seq_id, None)
            self._settle_released(seq_id)
            self._answered.discard(seq_id)
        self._wake_up.set()

    async def close(self) -> None:
        """Stop stepping; calls that wait fail."""
        self._worker.on_grammar_ready(lambda: None)
        self._task.cancel()
        self._sweeper.cancel()
        self._refuse_all(WorkerFailedError("the worker is closed"))
        await asyncio.gather(self._task, self._sweeper, return_exceptions=True)

    def _settle_released(self, seq_id: str) -> None:
        """Answer the call that waits for a sequence, if there is one: it was given up."""
        if seq_id in self._waiting:
            self._settle(self._worker.unanswered(seq_id, is_released=True))

    def _settle(self, result: ResultT) -> None:
        call = self._waiting.pop(result.seq_id, None)
        if call is None:
            return
        self._answered.add(result.seq_id)
        call.results[result.seq_id] = result
        call.num_missing -= 1
        if call.num_missing == 0:
            self._answer(call, self._reply(call))

    def _refuse_all(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, {}
        for call in waiting.values():
            self._answer(call, error)

    def _answer(self, call: Call[RequestT, ResultT], outcome: Reply[ResultT] | Exception) -> None:
        if call.is_answered:
            return
        call.is_answered = True
        try:
            call.answer(outcome)
        except Exception:  # of one caller: the others and the worker go on
            logger.exception("an answer was not given")

    def _reply(self, call: Call[RequestT, ResultT]) -> Reply[ResultT]:
        return Reply(
            replica_id=self._replica_id,
            compute_s=self.work.busy_s - call.before.busy_s,
            num_steps=self.work.num_steps - call.before.num_steps,
            num_tokens=self.work.num_tokens - call.before.num_tokens,
            num_prefill_tokens=self._worker.num_prefill_tokens,
            results=tuple(call.results[request.seq_id] for request in call.batch),
            steps_version=self._worker.step_table.version,
        )

    async def _run(self) -> None:
        """Run a step whenever another may serve what waits."""
        while True:
            await self._wake_up.wait()
            self._wake_up.clear()
            await self._wait_for_answered()
            if self._submit_error is not None:
                raise self._submit_error
            self._is_between_steps = False
            began, self._step_began = self._clock(), time.perf_counter()
            results, has_run = self._worker.step()
            self._count_step(has_run=has_run, began=began)
            for result in results:
                self._settle(result)
            # answers without a step may let others in; with neither, a call or a grammar must come
            may_serve = bool(self._waiting) and (has_run or bool(results))
            if self._time_a_step() or may_serve:
                self._wake_up.set()
            await _hear()
            self._work_at_last_poll = self.work
            self._is_between_steps = True
            if not self._wake_up.is_set():
                self._worker.park_threads()

    def _end(self, task: "asyncio.Task[None]") -> None:
        """Tell callers and `on_failure` that the worker can go on no more."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("the worker has failed", exc_info=error)
        self._refuse_all(self._loss(error))
        if self._on_failure is not None:
            self._on_failure(f"a step has failed: {error}")

    def _loss(self, failure: BaseException) -> WorkerLostError:
        """What callers are told; a step of a group also fails when another rank is lost."""
        kind = WorkerLostError if self._worker.is_in_group else WorkerFailedError
        return kind(f"the worker has failed: {failure}")

    def _count_step(self, *, has_run: bool, began: float) -> None:
        """Count a step that began at `began` of the loop's clock, and note when it ended."""
        assert self._step_began is not None
        self.work = Work(
            num_steps=self.work.num_steps + has_run,
            num_tokens=self._worker.num_tokens_run,
            busy_s=self.work.busy_s + time.perf_counter() - self._step_began,
        )
        self._step_began = None
        if has_run:
            self._last_step_ended = self._clock()
            self._last_step_s = self._last_step_ended - began
            self._answered.clear()

    def measure_steps(self) -> None:
        """Have the worker time its steps anew if another forward runs them by now, all at once."""
        if self._worker.step_table.is_outdated:
            self._worker.step_table.measure()

    def _time_a_step(self) -> bool:
        """Time a step for an outdated table, where that is due; returns whether another may follow
        at once."""
        if not self._timing.is_due(busy_s=self.work.busy_s, is_idle=not self._waiting):
            return False
        self._step_began = time.perf_counter()
        self._timing.time_one_step(busy_s=self.work.busy_s)
        self._step_began = None
        return not self._waiting

    async def _wait_for_answered(self) -> None:
        """Wait for callers that were answered, before a step of nothing but new or long prompts:
        see RejoinWait."""
        until = self._last_step_ended + self._rejoin_wait.limit_s(last_step_s=self._last_step_s)
        limit_s = until - self._clock()
        if limit_s <= 0.0 or not self._waiting or not self._is_somebody_missing:
            return
        self._worker.park_threads()
        try:
            async with asyncio.timeout(limit_s):
                while self._is_somebody_missing:
                    self._wake_up.clear()
                    await self._wake_up.wait()
        except TimeoutError:
            self._rejoin_wait.observe(self._clock() - self._last_step_ended)

    @property
    def _is_somebody_missing(self) -> bool:
        """Whether callers were answered, and none of a running sequence has come since."""
        return bool(self._answered) and self._worker.has_only_prompts

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                self._sweep_once()
            except Exception:  # the next sweep may do better; without any, idle sequences stay
                logger.exception("idle sequences were not looked for")

    def _sweep_once(self) -> None:
        """Answer calls that wait for long, and forget sequences that nobody asks for.

        An idle worker whose forward is another one by now is woken, to time its steps.
        """
        if self._worker.step_table.is_outdated:
            self._wake_up.set()
        now = self._clock()
        ages = {seq_id: now - used for seq_id, used in self._last_used.items()}
        overdue = [
            seq_id
            for seq_id, age_s in ages.items()
            if age_s > LONGEST_WAIT_S and seq_id in self._waiting
        ]
        for result in self._worker.report_progress(overdue):
            self._settle(result)
        self.release(
            [
                seq_id
                for seq_id, age_s in ages.items()
                if age_s > self._idle_timeout_s and seq_id not in self._waiting
            ]
        )


async def _hear() -> None:
    """Let answers leave and calls come in.

    Twice round the event loop: the first time finds out which sockets can be read, the second
    reads them.
    """
    await asyncio.sleep(0)
    await asyncio.sleep(0)
