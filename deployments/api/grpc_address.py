"""The address that Serve's gRPC proxy listens on, which Serve itself has no option for."""

from functools import partial
from typing import Any

from ray.serve._private import default_impl
from ray.serve.config import gRPCOptions


class HostedGrpcOptions(gRPCOptions):
    """Serve's gRPC options, with the host to listen on.

    A proxy of Serve listens on all interfaces: it passes `[::]:port` to the `add_grpc_address` of
    its `default_impl`, which exists to be replaced. The options are the first of ours that reaches
    a proxy, by pickle, and so they replace it on arrival.
    """

    host: str

    def __setstate__(self, state: dict[Any, Any]) -> None:
        super().__setstate__(state)
        default_impl.add_grpc_address = partial(_add_address, host=self.host)


def _add_address(server: Any, address: str, *, host: str) -> None:
    """Listen on our host; the function that this replaces listens on all interfaces."""
    port = address.rpartition(":")[2]
    server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
