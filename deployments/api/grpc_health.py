"""`grpc.health.v1.Health` in Serve's proxy, which answers also while there is no router to ask."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from ray.serve._private.proxy_request_response import gRPCStreamingType

from deployments.api import tandem_pb2
from deployments.api.grpc_context import CallContext, ProbeContext

PROXY_HEALTH = "/ray.serve.RayServeAPIService/Healthz"
"""Serve's own method: it fails while the proxy drains, or knows no app yet."""
ROUTER_HEALTH = f"/{health_pb2.DESCRIPTOR.services_by_name['Health'].full_name}/Check"
"""Sent on to a router, whose method `Check` says whether its targets answer."""
APP_SERVICE = tandem_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
SERVICES = frozenset({"", APP_SERVICE})
"""What may be asked about: the server as a whole, and the app's service, which are one."""
PROBE_TIMEOUT_S = 3.0
WATCH_PERIOD_S = 1.0


class HealthServicer(health_pb2_grpc.HealthServicer):
    """SERVING while a router is there whose targets answer, and the proxy does not drain."""

    def __init__(self, make_handler: Callable[..., Any]) -> None:
        """`make_handler` is Serve's `service_handler_factory`."""
        self._ask_proxy, self._ask_router = (
            make_handler(service_method=path, streaming_type=gRPCStreamingType.UNARY_UNARY)
            for path in (PROXY_HEALTH, ROUTER_HEALTH)
        )

    async def Check(self, request: HealthCheckRequest, context: CallContext) -> HealthCheckResponse:
        """The status now; NOT_FOUND for a service that is not here."""
        if request.service not in SERVICES:
            await context.abort(grpc.StatusCode.NOT_FOUND, _unknown(request.service))
        return HealthCheckResponse(status=await self._status(context))

    async def Watch(
        self, request: HealthCheckRequest, context: CallContext
    ) -> AsyncIterator[HealthCheckResponse]:
        """The status now and whenever it has changed, as long as the client listens."""
        told = None
        while True:
            status = (
                await self._status(context)
                if request.service in SERVICES
                else HealthCheckResponse.SERVICE_UNKNOWN
            )
            if status != told:
                told = status
                yield HealthCheckResponse(status=status)
            await asyncio.sleep(WATCH_PERIOD_S)

    async def _status(self, context: CallContext) -> Any:
        """Whether a request would be served now; a router that does not answer would not."""
        for ask in (self._ask_proxy, self._ask_router):
            probe = ProbeContext(context)
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    raw = await ask(HealthCheckRequest(), probe)
            except TimeoutError:
                return HealthCheckResponse.NOT_SERVING
            if probe.code() is not grpc.StatusCode.OK:
                return HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse.FromString(raw).status


def _unknown(service: str) -> str:
    return f"there is no service {service[:80]!r} here; ask about '' or {APP_SERVICE!r}"
