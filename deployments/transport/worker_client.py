"""What a router may ask of one kind of worker.

Whatever goes wrong with a remote call, no answer came, which is raised as WorkerLostError: the
sequences' truth is in the router, so it asks again elsewhere. WorkerFailedError says besides that
what the call carried may be the cause, WorkerTimeoutError that nothing is known of the worker.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from workers.types import Reply

RequestT = TypeVar("RequestT", contravariant=True)
ResultT = TypeVar("ResultT", bound=object)


class WorkerClient(Protocol[RequestT, ResultT]):
    """One kind of worker, however many replicas it has."""

    async def call(
        self, replica_id: str | None, batch: Sequence[RequestT], *, timeout_s: float
    ) -> Reply[ResultT]:
        """Serve a batch on a replica, or on any; raises WorkerLostError and its subclasses.

        A replica that is gone is replaced by another, which will ask for the tokens it lacks. The
        sequences of a call that fails or is cancelled are released where it was sent.
        """
        ...

    def release(self, replica_id: str, seq_ids: Sequence[str]) -> None:
        """Let a replica forget sequences, before it hears of any later call.

        One that cannot be told is gone, or will forget by itself what it is not asked for.
        """
        ...

    async def find(self) -> str:
        """The id of a replica that answers now; raises WorkerTimeoutError."""
        ...
