"""What a router may ask of one kind of worker, whatever carries the question.

Everything that goes wrong with a remote call means the same to the router, that no answer came,
and is raised as WorkerLostError: the sequences' truth is there, so it asks again elsewhere.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from workers.types import Reply

RequestT = TypeVar("RequestT", contravariant=True)
ResultT = TypeVar("ResultT")


class WorkerClient(Protocol[RequestT, ResultT]):
    """One kind of worker, however many replicas it has."""

    async def call(
        self, replica_id: str | None, batch: Sequence[RequestT], *, timeout_s: float
    ) -> Reply[ResultT]:
        """Serve a batch on a replica, or on any; raises WorkerLostError.

        A replica that is gone is replaced by another, which will ask for the tokens it lacks.
        """
        ...

    async def release(self, replica_id: str, seq_ids: Sequence[str]) -> None:
        """Let a replica forget sequences; raises WorkerLostError."""
        ...
