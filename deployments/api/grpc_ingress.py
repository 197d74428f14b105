"""The gRPC methods as Serve's proxy calls them by name: of the deployment that mixes this in."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, TypeVar

from ray.serve.grpc_util import RayServegRPCContext

from workers.errors import OverloadedError

if TYPE_CHECKING:
    from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

    from deployments.api import tandem_pb2
    from deployments.api.grpc import Rpcs

ChunkT = TypeVar("ChunkT")


class GrpcIngress:
    """Hands each method on. `grpc_context` is a name that Serve looks for."""

    _rpcs: "Rpcs"

    async def Generate(
        self, request: "tandem_pb2.GenerateRequest", grpc_context: RayServegRPCContext
    ) -> "tandem_pb2.GenerateResponse":
        return await self._rpcs.generate(request, grpc_context)

    async def GenerateStream(
        self, request: "tandem_pb2.GenerateRequest", grpc_context: RayServegRPCContext
    ) -> "AsyncIterator[tandem_pb2.GenerateChunk]":
        from deployments.api.tandem_pb2 import GenerateChunk

        chunks = self._rpcs.generate_stream(request, grpc_context)
        async for chunk in _with_metadata(chunks, GenerateChunk()):
            yield chunk

    async def Chat(
        self, request: "tandem_pb2.ChatRequest", grpc_context: RayServegRPCContext
    ) -> "tandem_pb2.ChatResponse":
        return await self._rpcs.chat(request, grpc_context)

    async def ChatStream(
        self, request: "tandem_pb2.ChatRequest", grpc_context: RayServegRPCContext
    ) -> "AsyncIterator[tandem_pb2.ChatChunk]":
        from deployments.api.tandem_pb2 import ChatChunk

        chunks = self._rpcs.chat_stream(request, grpc_context)
        async for chunk in _with_metadata(chunks, ChatChunk()):
            yield chunk

    async def Tokenize(
        self, request: "tandem_pb2.TokenizeRequest", grpc_context: RayServegRPCContext
    ) -> "tandem_pb2.TokenizeResponse":
        return await self._rpcs.tokenize(request, grpc_context)

    async def Detokenize(
        self, request: "tandem_pb2.DetokenizeRequest", grpc_context: RayServegRPCContext
    ) -> "tandem_pb2.DetokenizeResponse":
        return await self._rpcs.detokenize(request, grpc_context)

    async def ListModels(
        self, request: "tandem_pb2.ListModelsRequest", grpc_context: RayServegRPCContext
    ) -> "tandem_pb2.ListModelsResponse":
        return await self._rpcs.list_models(request, grpc_context)

    async def Check(
        self,
        request: "HealthCheckRequest",  # noqa: ARG002
        grpc_context: RayServegRPCContext,  # noqa: ARG002
    ) -> "HealthCheckResponse":
        """Asked by the proxies on behalf of `grpc.health.v1.Health`."""
        return self._rpcs.health()


async def _with_metadata(chunks: AsyncIterator[ChunkT], empty: ChunkT) -> AsyncIterator[ChunkT]:
    """The chunks, and before an error that has metadata an empty one, which `grpc_proxy` drops.

    Serve's proxy takes a call's metadata over with each chunk; of an error it is told the code and
    the details only.
    """
    try:
        async for chunk in chunks:
            yield chunk
    except OverloadedError:
        yield empty
        raise
