"""Where Serve's gRPC server listens."""

import asyncio
import pickle
from typing import Any

import psutil
import pytest
from ray.serve._private import default_impl
from ray.serve._private.grpc_util import start_grpc_server

from deployments.api.grpc_address import HostedGrpcOptions
from tandem.live.server import free_port


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_grpc_listens_on_the_host_of_the_options(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a proxy of Serve, which gets its options by pickle."""
    port = free_port()
    # which the options replace on arrival; put back after the test
    monkeypatch.setattr(default_impl, "add_grpc_address", default_impl.add_grpc_address)
    options: Any = pickle.loads(pickle.dumps(HostedGrpcOptions(host=host, port=port)))
    task, server = await start_grpc_server(
        lambda **_: None, options, event_loop=asyncio.get_running_loop()
    )
    addresses = {
        connection.laddr.ip.removeprefix("::ffff:")
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }
    await server.stop(None)
    await task
    assert addresses == ({host} if host == "127.0.0.1" else {"::"})
