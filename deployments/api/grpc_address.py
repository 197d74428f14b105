"""The address of Serve's gRPC proxy, and its encryption, for which Serve has no options."""

from functools import partial
from pathlib import Path
from typing import Any

import grpc
from ray.serve._private import default_impl
from ray.serve.config import gRPCOptions


class HostedGrpcOptions(gRPCOptions):
    """Serve's gRPC options, with the host to listen on and the files of TLS.

    A proxy of Serve listens on all interfaces, unencrypted: it passes `[::]:port` to the
    `add_grpc_address` of its `default_impl`, which exists to be replaced. The options are the first
    of ours that reaches a proxy, by pickle, and so they replace it on arrival.
    """

    host: str
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    """The key's file, which goes with the certificate's: where both lie on each node. Without them,
    gRPC is plain text."""

    def __setstate__(self, state: dict[Any, Any]) -> None:
        super().__setstate__(state)
        default_impl.add_grpc_address = partial(_add_address, options=self)


def _add_address(server: Any, address: str, *, options: HostedGrpcOptions) -> None:
    """Listen on our host; the function that this replaces listens on all interfaces."""
    host, port = options.host, address.rpartition(":")[2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if options.tls_cert_file is None or options.tls_key_file is None:
        server.add_insecure_port(address)
        return
    key, cert = (Path(p).read_bytes() for p in (options.tls_key_file, options.tls_cert_file))
    server.add_secure_port(address, grpc.ssl_server_credentials([(key, cert)]))
