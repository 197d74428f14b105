"""Workers over Serve handles: finds replicas, balances between them, survives their loss."""

import asyncio
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.transport.messages import StreamAddress
from workers.errors import WorkerLostError
from workers.types import Reply

RELEASE_TIMEOUT_S = 30.0
ADDRESS_TIMEOUT_S = 10.0

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")


class HandleClient(Generic[RequestT, ResultT]):
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
        self, replica_id: str | None, batch: Sequence[RequestT], *, timeout_s: float
    ) -> Reply[ResultT]:
        reply: Reply[ResultT] = await self._await(replica_id, self._method, timeout_s, list(batch))
        return reply

    async def release(self, replica_id: str, seq_ids: Sequence[str]) -> None:
        await self._await(replica_id, "release", RELEASE_TIMEOUT_S, list(seq_ids))

    async def stream_address(self, replica_id: str) -> StreamAddress:
        """Where a replica listens, or another if it is gone; raises WorkerLostError."""
        address: StreamAddress = await self._await(replica_id, "stream_address", ADDRESS_TIMEOUT_S)
        return address

    async def _await(
        self, replica_id: str | None, method: str, timeout_s: float, *arguments: object
    ) -> Any:
        response = self._method_of(replica_id or "", method).remote(*arguments)
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
