"""The gRPC side of the app without Ray: Serve's server, our handlers in it, and a router behind."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
from ray.serve._private.grpc_util import gRPCGenericServer
from ray.serve._private.proxy_request_response import gRPCStreamingType
from ray.serve.grpc_util import RayServegRPCContext

from deployments.api.grpc import Rpcs
from deployments.api.grpc_health import PROXY_HEALTH
from deployments.api.grpc_ingress import GrpcIngress
from deployments.api.grpc_proxy import add_generation_to_server
from deployments.api.tandem_pb2_grpc import GenerationServicer
from deployments.router.service import GenerationService


class _Router(GrpcIngress):
    """The methods of the deployment, which Serve would call in another process."""

    def __init__(self, service: GenerationService, max_request_bytes: int) -> None:
        self._rpcs = Rpcs(service, max_request_bytes=max_request_bytes)


@asynccontextmanager
async def grpc_channel(
    service: GenerationService, *, max_request_bytes: int
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server on a free port of this machine."""
    router = _Router(service, max_request_bytes)
    server = gRPCGenericServer(partial(_make_handler, router))
    port = server.add_insecure_port("127.0.0.1:0")
    add_generation_to_server(GenerationServicer(), server)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


def _make_handler(router: _Router, *, service_method: str, streaming_type: Any) -> Any:
    """What Serve's own factory makes, with the call of a replica left out."""
    if service_method == PROXY_HEALTH:
        return _proxy_is_healthy
    method = getattr(router, service_method.rpartition("/")[2])

    async def unary(request: Any, context: Any) -> bytes:
        told = RayServegRPCContext(context)
        response = await method(request, told)
        _pass_on(told, context)
        return bytes(response.SerializeToString())

    async def stream(request: Any, context: Any) -> AsyncIterator[bytes]:
        told = RayServegRPCContext(context)
        try:
            async for response in method(request, told):
                yield response.SerializeToString()
        except Exception:
            code: Any = told.code()  # which may be none at all
            if not code:  # as Serve has it, a failure without a code is one of ours
                told.set_code(grpc.StatusCode.INTERNAL)
        _pass_on(told, context)

    return stream if streaming_type is gRPCStreamingType.UNARY_STREAM else unary


def _pass_on(told: RayServegRPCContext, context: Any) -> None:
    """Give the call the status that a method has set."""
    told._set_on_grpc_context(context)
    if not context.code():
        context.set_code(grpc.StatusCode.OK)


async def _proxy_is_healthy(request: Any, context: Any) -> bytes:  # noqa: ARG001
    context.set_code(grpc.StatusCode.OK)
    return b""
