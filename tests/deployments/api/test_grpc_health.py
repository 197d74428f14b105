"""`grpc.health.v1.Health` on Serve's own server, with a router behind it, and without."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from ray.serve._private.grpc_util import gRPCGenericServer

from deployments.api import grpc_health
from deployments.api.grpc_health import APP_SERVICE, PROXY_HEALTH
from deployments.api.grpc_proxy import add_generation_to_server, malformed

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


class Behind:
    """Serve's proxy and a router, as they answer probes."""

    def __init__(self) -> None:
        self.is_draining = False
        self.router: HealthCheckResponse.ServingStatus.ValueType | None = SERVING
        """What a router says; None where there is none."""
        self.is_stuck = False
        self.num_waiting = 0

    def make_handler(self, *, service_method: str, **_: Any) -> Callable[..., Any]:
        ask = self._ask_proxy if service_method == PROXY_HEALTH else self._ask_router

        async def unary(request: Any, context: Any) -> bytes:
            assert context.peer()
            code, answer = await ask(request)
            context.set_code(code)
            context.set_details("of the probe")
            context.set_trailing_metadata([("of", "the probe")])
            return answer

        return unary

    async def _ask_proxy(self, _: Any) -> tuple[grpc.StatusCode, bytes]:
        return (grpc.StatusCode.UNAVAILABLE if self.is_draining else grpc.StatusCode.OK), b""

    async def _ask_router(self, request: Any) -> tuple[grpc.StatusCode, bytes]:
        assert isinstance(request, HealthCheckRequest)
        if self.is_stuck:
            self.num_waiting += 1
            try:
                await asyncio.sleep(60)
            finally:
                self.num_waiting -= 1
        if self.router is None:
            return grpc.StatusCode.NOT_FOUND, b""
        return grpc.StatusCode.OK, HealthCheckResponse(status=self.router).SerializeToString()


@pytest.fixture
def behind() -> Behind:
    return Behind()


@pytest.fixture
async def channel(behind: Behind) -> AsyncIterator[grpc.aio.Channel]:
    async with channel_to(behind) as channel:
        yield channel


@asynccontextmanager
async def channel_to(behind: Behind) -> AsyncIterator[grpc.aio.Channel]:
    server = gRPCGenericServer(behind.make_handler)
    port = server.add_insecure_port("127.0.0.1:0")
    add_generation_to_server(Mock(), server)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def check(channel: grpc.aio.Channel, service: str = "") -> int:
    response = await HealthStub(channel).Check(HealthCheckRequest(service=service), timeout=10)
    return int(response.status)


async def test_it_serves_while_a_router_is_ready(channel: grpc.aio.Channel, behind: Behind) -> None:
    assert await check(channel) == SERVING
    assert await check(channel, APP_SERVICE) == SERVING
    behind.router = NOT_SERVING  # no target answers
    assert await check(channel) == NOT_SERVING
    behind.router = None  # no app is deployed
    assert await check(channel) == NOT_SERVING
    behind.router, behind.is_draining = SERVING, True
    assert await check(channel) == NOT_SERVING


async def test_a_probe_is_not_seen_in_the_answer(channel: grpc.aio.Channel, behind: Behind) -> None:
    behind.is_draining = True
    call = HealthStub(channel).Check(HealthCheckRequest(), timeout=10)
    await call
    assert await call.code() is grpc.StatusCode.OK
    assert await call.details() == ""
    assert "of" not in dict(await call.trailing_metadata())


async def test_a_router_that_does_not_answer_does_not_serve(
    channel: grpc.aio.Channel, behind: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_health, "PROBE_TIMEOUT_S", 0.05)
    behind.is_stuck = True
    assert await check(channel) == NOT_SERVING
    assert behind.num_waiting == 0


async def test_unknown_services_are_told_so(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="there is no service 'other'") as caught:
        await check(channel, "other")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    call = HealthStub(channel).Watch(HealthCheckRequest(service="other"), timeout=10)
    assert (await call.read()).status == HealthCheckResponse.SERVICE_UNKNOWN
    call.cancel()


async def test_bytes_that_are_no_request_are_told_so(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff", timeout=10)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == malformed("HealthCheckRequest")


async def test_who_watches_is_told_of_changes(
    channel: grpc.aio.Channel, behind: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_health, "WATCH_PERIOD_S", 0.01)
    call = HealthStub(channel).Watch(HealthCheckRequest(), timeout=30)
    assert (await call.read()).status == SERVING
    behind.router = NOT_SERVING
    assert (await call.read()).status == NOT_SERVING
    behind.router = SERVING
    assert (await call.read()).status == SERVING
    call.cancel()


async def test_a_watch_ends_with_its_call(behind: Behind) -> None:
    behind.is_stuck = True
    async with channel_to(behind) as channel:
        call = HealthStub(channel).Watch(HealthCheckRequest())
        while not behind.num_waiting:
            await asyncio.sleep(0.01)
        call.cancel()
        async with asyncio.timeout(10):
            while behind.num_waiting:
                await asyncio.sleep(0.01)
