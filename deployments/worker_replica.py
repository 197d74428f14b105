"""What a target and a draft replica have in common: a worker, its loop, and who it is.

Serve pickles deployments by reference, and whoever builds the app imports this module and its
subclasses' modules; torch is imported only where a replica starts.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from ray import serve

from deployments.metrics import WorkerMetrics
from workers.types import Reply, WorkerInfo, WorkRequest, WorkResult

if TYPE_CHECKING:
    from workers.step_worker import StepWorker

RequestT = TypeVar("RequestT", bound=WorkRequest)
ResultT = TypeVar("ResultT", bound=WorkResult)

IDLE_TIMEOUT_S = 300.0


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


class WorkerReplica(Generic[RequestT, ResultT]):
    """Serves the calls of all routers from one worker; a deployment adds the call's name."""

    def _start(
        self,
        make_worker: "Callable[[], StepWorker[RequestT, ResultT]]",
        *,
        role: str,
        num_threads: int,
    ) -> None:
        """Make the worker; called from a constructor, on Serve's event loop."""
        import torch

        from deployments.step_loop import StepLoop

        def make_on_thread() -> "StepWorker[RequestT, ResultT]":
            torch.set_num_threads(num_threads)  # OpenMP counts per thread
            return make_worker()

        self._loop = StepLoop(
            make_on_thread,
            idle_timeout_s=IDLE_TIMEOUT_S,
            clock=time.monotonic,
        )
        self._metrics = WorkerMetrics(role)
        self._replica_id = serve.get_replica_context().replica_id.unique_id

    async def _run_batch(self, batch: Sequence[RequestT]) -> Reply[ResultT]:
        arrived = time.perf_counter()
        results = await self._loop.run_batch(batch)
        return Reply(
            replica_id=self._replica_id, served_s=time.perf_counter() - arrived, results=results
        )

    async def release(self, seq_ids: Sequence[str]) -> None:
        """Forget sequences and free their blocks."""
        self._loop.release(seq_ids)

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
            num_steps=self._loop.num_steps,
        )

    def check_health(self) -> None:
        """Called by Serve every few seconds; raises if the worker is beyond help."""
        if (failure := self._loop.failure) is not None:
            raise RuntimeError("the worker has failed") from failure
        worker = self._loop.worker
        self._metrics.observe(
            num_sequences=worker.num_sequences, num_used_blocks=worker.num_used_blocks
        )
