"""What a target and a draft replica have in common: a worker, its loop, and who it is.

Serve pickles deployments by reference, and whoever builds the app imports this module and its
subclasses' modules; torch is imported only where a replica starts.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import ray
from ray import serve

from deployments.args import AppArgs
from deployments.autoscaling import NUM_SEQUENCES
from deployments.compiling import until_compiled
from deployments.metrics import WorkerMetrics
from deployments.replicas.step_loop import StepLoop
from deployments.replicas.step_thread import StepThread
from deployments.transport.messages import Codec, ReplicaReport
from deployments.transport.stream_server import StreamServer
from workers.types import WorkerInfo, WorkRequest, WorkResult

if TYPE_CHECKING:
    from workers.step_worker import StepWorker

RequestT = TypeVar("RequestT", bound=WorkRequest)
ResultT = TypeVar("ResultT", bound=WorkResult)

logger = logging.getLogger(__name__)

IDLE_TIMEOUT_S = 60.0
LAST_WORDS_S = 0.2
"""Seconds between the answers of a worker that has failed and the end of its process: they say that
what the calls carried may be the cause, which a connection that ends does not."""
DEPLOYMENT_OPTIONS: Mapping[str, Any] = {
    "max_ongoing_requests": 1000,
    "max_constructor_retry_count": 3,
    "health_check_period_s": 5,
    "logging_config": {"enable_access_log": False},  # it would write a line per round
}
"""Serve's options of the deployments of workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """What a replica holds at the moment."""

    replica_id: str
    pid: int
    num_sequences: int
    num_used_blocks: int
    num_waiting: int
    num_steps: int
    """Model steps since the start."""
    num_preemptions: int
    """Sequences that lost their cache to others, since the start."""
    is_compiling: bool
    """Whether the model's forward is being compiled beside the steps."""
    is_compiled: bool
    """Whether steps are run by a compiled forward, or one recorded as CUDA graphs."""
    warnings: tuple[str, ...]
    """What an operator should know of: sentences."""
    rank_pids: tuple[int, ...] = ()
    """The process ids of a target group's other ranks."""


class WorkerReplica(Generic[RequestT, ResultT]):
    """Serves the calls of all routers from one worker.

    The worker, its loop and the streams live on a thread of their own, so that steps never hold up
    Serve's event loop, which answers whoever asks about the replica.
    """

    async def _start(
        self,
        args: AppArgs,
        make_worker: "Callable[[], StepWorker[RequestT, ResultT]]",
        codec: Codec[RequestT, ResultT],
        *,
        role: str,
        can_compile: bool = True,
    ) -> None:
        """Make the worker; called from a constructor.

        `make_worker` is called on the worker's thread, whose number of OpenMP threads it sets:
        torch counts them for each calling thread.
        """
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        compiling: list[threading.Thread] = []

        def make_on_thread() -> "StepWorker[RequestT, ResultT]":
            worker = make_worker()
            worker.step_table.measure()
            if args.compile != "off" and can_compile:
                compiling.append(worker.start_compiling())
            return worker

        def make_loop() -> StepLoop[RequestT, ResultT]:
            return StepLoop(
                make_on_thread,
                idle_timeout_s=IDLE_TIMEOUT_S,
                clock=time.monotonic,
                replica_id=self._replica_id,
                on_failure=self._end_soon,
            )

        self._step_timeout_s = args.verify_timeout_s
        self._thread = StepThread()
        self._loop = await self._thread.make(make_loop)
        if args.compile == "wait":
            await until_compiled(compiling, self._loop.worker.info.model)
        await self._thread.run(self._measure_steps())
        self._loop.worker.start_loading_grammars()
        for warning in self._loop.worker.warnings:
            logger.warning("%s", warning)
        self._compiling = compiling
        self._metrics = WorkerMetrics(role)
        self._server = StreamServer(codec, run=self._loop.submit, release=self._loop.release)
        self._address = await self._thread.run(
            self._server.start(ray.util.get_node_ip_address(), self._replica_id)
        )

    async def _measure_steps(self) -> None:
        """Time steps before the first call; a forward that has taken over meanwhile is timed in its
        turn."""
        self._loop.measure_steps()

    def _end(self, reason: str) -> None:
        """End the process: routers notice at once, and Serve starts another replica."""
        logger.error("this replica ends: %s", reason)
        os._exit(1)

    def _end_soon(self, reason: str) -> None:
        """End the process once callers have been told; called on the worker's thread."""
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self._end, reason)

    async def report(self) -> ReplicaReport:
        """Where routers may stream their calls to, and how much is cached here."""
        worker = self._loop.worker
        return ReplicaReport(
            address=self._address,
            num_cached_tokens=worker.num_used_blocks * worker.info.block_size,
        )

    async def info(self) -> WorkerInfo:
        return self._loop.worker.info

    async def status(self) -> WorkerStatus:
        worker = self._loop.worker
        return WorkerStatus(
            replica_id=self._replica_id,
            pid=os.getpid(),
            num_sequences=worker.num_sequences,
            num_used_blocks=worker.num_used_blocks,
            num_waiting=worker.num_waiting,
            num_steps=self._loop.work.num_steps,
            num_preemptions=worker.num_preemptions,
            is_compiling=any(thread.is_alive() for thread in self._compiling),
            is_compiled=worker.is_compiled,
            warnings=worker.warnings,
        )

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve, for `deployments.autoscaling`."""
        return {NUM_SEQUENCES: self._loop.worker.num_sequences}

    def check_health(self) -> None:
        """Called by Serve every few seconds; raises if the worker is beyond help.

        One whose step hangs ends at once: Serve would first ask it to finish.
        """
        if (failure := self._loop.failure) is not None:
            raise RuntimeError("the worker has failed") from failure
        if self._loop.step_s > self._step_timeout_s:
            self._end(f"a step has taken {self._loop.step_s:.0f} s")
        worker = self._loop.worker
        self._metrics.observe(
            num_sequences=worker.num_sequences,
            num_used_blocks=worker.num_used_blocks,
            num_prompt_tokens=worker.num_prompt_tokens,
            num_prefix_tokens=worker.num_prefix_tokens,
            num_preemptions=worker.num_preemptions,
        )
