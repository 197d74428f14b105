"""How the router reaches workers: one small protocol, spoken over Serve handles.

Everything that goes wrong with a remote call means the same to the router, that no answer came,
and is raised as WorkerLostError: the sequences' truth is here, so it asks again elsewhere.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from workers.errors import WorkerLostError
from workers.types import Reply

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", contravariant=True)
ResultT = TypeVar("ResultT")

RELEASE_TIMEOUT_S = 30.0


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


HandleRequestT = TypeVar("HandleRequestT")


class HandleClient(Generic[HandleRequestT, ResultT]):
    """A WorkerClient over a Serve deployment handle.

    The replica id travels as Serve's session id: `deployments.pinning` routes by it.
    """

    def __init__(self, handle: DeploymentHandle[Any], method: str) -> None:
        # by value: these messages are small, and a trip through the object store costs more
        self._handle = handle.options(
            _by_reference=False,
            request_serialization="pickle",
            response_serialization="pickle",
        )
        self._method = method
        self._pinned: dict[tuple[str, str], Any] = {}

    async def call(
        self, replica_id: str | None, batch: Sequence[HandleRequestT], *, timeout_s: float
    ) -> Reply[ResultT]:
        reply: Reply[ResultT] = await self._await(replica_id, self._method, batch, timeout_s)
        return reply

    async def release(self, replica_id: str, seq_ids: Sequence[str]) -> None:
        await self._await(replica_id, "release", seq_ids, RELEASE_TIMEOUT_S)

    async def _await(
        self, replica_id: str | None, method: str, argument: Sequence[Any], timeout_s: float
    ) -> Any:
        response = self._method_of(replica_id or "", method).remote(list(argument))
        try:
            async with asyncio.timeout(timeout_s):
                return await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except TimeoutError:
            response.cancel()
            raise WorkerLostError(f"{method} brought no answer in {timeout_s:g} s") from None
        except (RayError, RayServeException, OSError) as error:
            raise WorkerLostError(f"{method} failed: {error}") from error

    def _method_of(self, session_id: str, method: str) -> Any:
        """The bound remote method; made once per replica, as `options` is not cheap."""
        key = (session_id, method)
        if key not in self._pinned:
            self._pinned[key] = self._handle.options(session_id=session_id, method_name=method)
        return self._pinned[key]
