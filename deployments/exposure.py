"""Which machines can reach Ray and Serve, and whether they need a token.

Whoever reaches a port of Ray, or the one that each replica of Serve has for others, can run code
there: both unpickle what they are sent. With token authentication they refuse strangers first.
"""

import ipaddress
from collections.abc import Iterable

import ray
from ray._private.authentication.authentication_token_setup import enable_token_auth_by_default
from ray._private.authentication.authentication_utils import is_token_auth_enabled

from deployments.args import AppArgs
from workers.errors import ConfigError


def check_exposure(args: AppArgs) -> None:
    """Raise ConfigError if strangers can reach a Ray that asks for no token.

    Where Ray is not connected yet, one of this machine is going to be started.
    """
    if ray.is_initialized():
        has_token = is_token_auth_enabled()
        addresses = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    else:
        has_token = enable_token_auth_by_default()  # as ray.init will, unless RAY_AUTH_MODE is set
        addresses = [ray.util.get_node_ip_address()]
    refuse_strangers(args, has_token=has_token, addresses=addresses)


def refuse_strangers(args: AppArgs, *, has_token: bool, addresses: Iterable[str]) -> None:
    """See check_exposure.

    Args:
        has_token: whether Ray asks for one.
        addresses: of Ray's nodes.
    """
    if has_token or args.allow_unauthenticated_cluster:
        return
    reachable = [f"Ray's node at {address}" for address in addresses if not is_loopback(address)]
    if not is_loopback(args.http_host):
        reachable.append(f"http_host={args.http_host}")
    if reachable:
        raise ConfigError(
            f"Ray asks nobody for a token here, and other machines can reach {reachable[0]}: who "
            "does can run code in the servers; set RAY_AUTH_MODE=token wherever Ray is started and "
            "for this command, or allow it with allow_unauthenticated_cluster=true"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
