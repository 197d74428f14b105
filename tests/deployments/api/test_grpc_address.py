"""Where Serve's gRPC server listens, and whether it encrypts."""

import asyncio
import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from ray.serve._private import default_impl
from ray.serve._private.grpc_util import start_grpc_server

from deployments.api.grpc_address import HostedGrpcOptions
from tandem.live.server import free_port
from tests.certificates import make_certificate


@pytest.fixture(autouse=True)
def own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The options replace it on arrival; it is put back after the test."""
    monkeypatch.setattr(default_impl, "add_grpc_address", default_impl.add_grpc_address)


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[None]:
    """Serve's server as a proxy starts it, which gets its options by pickle."""
    arrived: Any = pickle.loads(pickle.dumps(HostedGrpcOptions(**options)))
    task, server = await start_grpc_server(
        lambda **_: None, arrived, event_loop=asyncio.get_running_loop()
    )
    yield
    await server.stop(None)
    await task


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_grpc_listens_on_the_host_of_the_options(host: str) -> None:
    port = free_port()
    async with serving(host=host, port=port):
        addresses = {
            connection.laddr.ip.removeprefix("::ffff:")
            for connection in psutil.Process().net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        }
    assert addresses == ({host} if host == "127.0.0.1" else {"::"})


async def code(channel: grpc.aio.Channel) -> grpc.StatusCode:
    """How a call of a method ends that is not there."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await HealthStub(channel).Check(HealthCheckRequest(), timeout=10)
    return caught.value.code()


async def test_grpc_is_encrypted_with_the_certificate_of_the_options(tmp_path: Path) -> None:
    made, other = make_certificate(tmp_path), make_certificate(tmp_path, "other")
    port = free_port()
    address = f"127.0.0.1:{port}"
    async with serving(host="127.0.0.1", port=port, **made.options):
        trusting, doubting = (
            grpc.ssl_channel_credentials(certificate.cert_file.read_bytes())
            for certificate in (made, other)
        )
        async with grpc.aio.secure_channel(address, trusting) as channel:
            assert await code(channel) is grpc.StatusCode.UNIMPLEMENTED
        async with grpc.aio.secure_channel(address, doubting) as channel:
            assert await code(channel) is grpc.StatusCode.UNAVAILABLE
        async with grpc.aio.insecure_channel(address) as channel:
            assert await code(channel) is grpc.StatusCode.UNAVAILABLE
