"""Workers over Serve handles: finds replicas, balances between them, survives their loss."""

import asyncio
import functools
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.transport.messages import StreamAddress
from workers.errors import WorkerFailedError, WorkerLostError, WorkerTimeoutError
from workers.types import Reply

RELEASE_TIMEOUT_S = 30.0
ADDRESS_TIMEOUT_S = 10.0
MAX_PINNED = 256
"""Replicas and methods whose bound handles are kept; those of the longest unused go first."""

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")


class HandleClient(Generic[RequestT, ResultT]):
    """A WorkerClient over a Serve deployment handle.

    The replica id travels as Serve's session id: `deployments.transport.pinning` routes by it.
    """

    def __init__(self, handle: DeploymentHandle[Any], method: str) -> None:
        # by value: these messages are small, and a trip through the object store costs more
        self._handle = handle.options(
            _by_reference=False,
            request_serialization="pickle",
            response_serialization="pickle",
        )
        self._method = method
        self._method_of = functools.lru_cache(MAX_PINNED)(self._bind)

    async def call(
        self, replica_id: str | None, batch: Sequence[RequestT], *, timeout_s: float
    ) -> Reply[ResultT]:
        reply: Reply[ResultT] = await self._await(replica_id, self._method, timeout_s, list(batch))
        return reply

    async def release(self, replica_id: str | None, seq_ids: Sequence[str]) -> None:
        if replica_id is not None:
            await self._await(replica_id, "release", RELEASE_TIMEOUT_S, list(seq_ids))
            return
        try:
            await self._handle.broadcast("release", list(seq_ids)).results_async(
                timeout_s=RELEASE_TIMEOUT_S, return_exceptions=True
            )
        except (RayError, RayServeException, OSError, TimeoutError) as error:
            raise WorkerLostError(f"release failed: {error}") from error

    async def find(self) -> str:
        address: StreamAddress = await self._await(None, "stream_address", ADDRESS_TIMEOUT_S)
        return address.replica_id

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
            raise WorkerTimeoutError(f"{method} brought no answer in {timeout_s:g} s") from None
        except ActorUnavailableError as error:  # perhaps a replica that was dead before
            raise WorkerTimeoutError(f"{method} reached no replica: {error}") from error
        except (RayError, RayServeException, OSError) as error:
            if isinstance(error, RayTaskError):  # the replica's own exception, if by actor call
                raise _own_error(method, error.cause) from error
            raise WorkerLostError(f"{method} failed: {error}") from error
        except Exception as error:  # the replica's own exception, if by Serve's gRPC
            raise _own_error(method, error) from error

    def _bind(self, session_id: str, method: str) -> Any:
        """The bound remote method; `options` is not cheap, so it is kept per replica."""
        return self._handle.options(session_id=session_id, method_name=method)


def _own_error(method: str, error: Exception) -> WorkerLostError:
    """What a replica's own exception means: its step or the call failed, unless it says less."""
    is_lost = isinstance(error, WorkerLostError) and not isinstance(error, WorkerFailedError)
    return (WorkerLostError if is_lost else WorkerFailedError)(f"{method} failed: {error}")
