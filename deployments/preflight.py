"""What can be found out before anything is started: options, addresses, tokens, models, memory."""

import errno
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._common.utils import get_system_memory
from ray._private.services import canonicalize_bootstrap_address

from cluster.found_model import FoundModel, Machine
from cluster.model_check import check_models
from deployments.args import AppArgs, environment_keys, parse_options
from deployments.exposure import check_exposure
from deployments.router.chat.template_file import read_template
from deployments.router.tenants.key_file import read_key_file
from deployments.tls import check_tls
from workers.errors import ConfigError

CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """Options that can be served, as far as that can be told."""

    args: AppArgs
    """The options, with ports that were free where any would do."""
    models: Sequence[FoundModel]
    """The target and the draft; nothing where they will run on other machines."""


def check_start(values: Mapping[str, Any]) -> Preflight:
    """Check the options of these names and values, and all that they speak of.

    Raises ConfigError: one sentence that names the option, its value and the fix.
    """
    args = parse_options(values)
    machine = None
    environment_keys()
    if starts_ray():
        if args.api_keys_file is not None:
            read_key_file(Path(args.api_keys_file))
        args = settle_addresses(args)
        check_exposure(args)
        check_tls(args)
        machine = _this_machine()
    elif _is_on_the_only_node():
        machine = _this_machine()
    if machine is not None and args.chat_template is not None:
        read_template(args.chat_template)  # what it says is seen by the router
    return Preflight(args=args, models=check_models(args, machine))


def _this_machine() -> Machine:
    return Machine(num_cpus=os.cpu_count() or 1, memory_bytes=get_system_memory())


def _is_on_the_only_node() -> bool:
    """Whether Ray runs here and nowhere else, as far as this process knows."""
    return ray.is_initialized() and sum(node["Alive"] for node in ray.nodes()) == 1


def starts_ray() -> bool:
    """Whether Ray will be started on this machine, for this app alone, since none is there.

    Raises ConfigError if RAY_ADDRESS names a Ray that is not there.
    """
    if ray.is_initialized():
        return False
    no_address: Any = None  # which Ray then looks for in RAY_ADDRESS and among what runs here
    try:
        address = canonicalize_bootstrap_address(no_address)
    except (ValueError, OSError) as error:
        raise ConfigError(f"RAY_ADDRESS is no address of Ray: {error}") from None
    if address is not None:
        _check_answers(address)
    return address is None


def _check_answers(address: str) -> None:
    """Ray itself would try for minutes to reach what is not there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"Ray is said to be at {address}, by RAY_ADDRESS or by a `ray start` on this machine, "
            f"but does not answer ({error}); start it there, or unset RAY_ADDRESS"
        ) from None


def settle_addresses(args: AppArgs) -> AppArgs:
    """The options with free ports in place of 0; raises ConfigError if an address is not ours."""
    http_port = _check_address("http", args.http_host, args.http_port)
    grpc_port = _check_address("grpc", args.grpc_host, args.grpc_port)
    return args.model_copy(update={"http_port": http_port, "grpc_port": grpc_port})


def _check_address(name: str, host: str, port: int) -> int:
    """The port, or a free one for 0.

    Args:
        name: `http` or `grpc`, with which the options begin.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise ConfigError(
            f"{name}_host is {host!r}, which is no address; use 127.0.0.1 for this machine alone, "
            "or 0.0.0.0 for all interfaces"
        ) from None
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen()
        except OSError as error:
            raise ConfigError(_why_not(name, host, port, error)) from None
        free_port: int = listener.getsockname()[1]
    return free_port


def _why_not(name: str, host: str, port: int, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"{name}_port is {port}, but another program listens there; end it, or choose "
                f"another port; {name}_port=0 takes any that is free"
            )
        case errno.EADDRNOTAVAIL:
            return (
                f"{name}_host is {host!r}, which is no address of this machine; use 127.0.0.1 for "
                "this machine alone, or 0.0.0.0 for all interfaces"
            )
        case errno.EACCES:
            return f"{name}_port is {port}, which only root may use; choose one above 1023"
        case _:
            return f"{name}_host={host} {name}_port={port} cannot be listened on: {error.strerror}"
