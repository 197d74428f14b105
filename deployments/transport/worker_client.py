"""What a router may ask of one kind of worker, whatever carries the question.

Whatever goes wrong with a remote call, no answer came, which is raised as WorkerLostError: the
sequences' truth is in the router, so it asks again elsewhere. WorkerFailedError says besides that
what the call carried may be the cause.
"""

import logging
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from workers.errors import WorkerLostError
from workers.types import Reply

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", contravariant=True)
ResultT = TypeVar("ResultT")


class WorkerClient(Protocol[RequestT, ResultT]):
    """One kind of worker, however many replicas it has."""

    async def call(
        self, replica_id: str | None, batch: Sequence[RequestT], *, timeout_s: float
    ) -> Reply[ResultT]:
        """Serve a batch on a replica, or on any; raises WorkerLostError or WorkerFailedError.

        A replica that is gone is replaced by another, which will ask for the tokens it lacks.
        """
        ...

    async def release(self, replica_id: str | None, seq_ids: Sequence[str]) -> None:
        """Let a replica forget sequences, or all replicas; raises WorkerLostError."""
        ...

    async def find(self) -> str:
        """The id of a replica that answers now; raises WorkerLostError."""
        ...


async def release_on(
    client: WorkerClient[Any, Any], replica_id: str | None, seq_ids: Sequence[str]
) -> None:
    """Free sequences on a replica, or on all; that it cannot be told is logged."""
    try:
        await client.release(replica_id, seq_ids)
    except WorkerLostError as error:
        # a replica that is gone holds nothing; one that lives forgets idle sequences by itself
        logger.info("%s not released on %s: %s", seq_ids, replica_id or "any", error)
