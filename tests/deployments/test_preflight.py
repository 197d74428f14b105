"""Addresses before they are listened on, and the order of the checks."""

import socket
from collections.abc import Iterator

import pytest

from deployments.args import AppArgs
from deployments.preflight import check_start, settle_addresses
from workers.errors import ConfigError


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("name", ["http", "grpc"])
def test_a_port_in_use_is_refused(name: str, taken_port: int) -> None:
    args = AppArgs(**{"http_port": 0, "grpc_port": 0, f"{name}_port": taken_port})
    with pytest.raises(ConfigError, match=f"^{name}_port is {taken_port}, but another program"):
        settle_addresses(args)


@pytest.mark.parametrize("name", ["http", "grpc"])
@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("192.0.2.77", "no address of this machine"),
        ("no such host", "no address"),
        ("", "no address"),
    ],
)
def test_a_host_that_is_not_ours_is_refused(name: str, host: str, words: str) -> None:
    args = AppArgs(**{"http_port": 0, "grpc_port": 0, f"{name}_host": host})
    with pytest.raises(ConfigError, match=f"^{name}_host is {host!r}, which is {words}"):
        settle_addresses(args)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_free_ports_take_the_place_of_zero(host: str) -> None:
    args = settle_addresses(AppArgs(http_host=host, http_port=0, grpc_port=0))
    assert args.http_port > 0
    assert args.grpc_port > 0
    assert settle_addresses(args) == args


def test_ports_that_are_free_stay() -> None:
    """What was closed a moment ago is free: the address is asked for as a server would."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            listener.accept()[0].close()
    assert settle_addresses(AppArgs(http_port=port, grpc_port=0)).http_port == port


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gama": "2"}, "no option 'gama'"),
        ({"target": "/no/such/folder", "drafter": "none"}, "no such folder"),
        ({"chat_template": "/no/such/file"}, "chat_template is '/no/such/file', which cannot be"),
        ({"http_host": "192.0.2.77"}, "no address of this machine"),
        # tests run with RAY_AUTH_MODE=disabled
        ({"http_host": "0.0.0.0"}, "asks nobody for a token"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    values: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without torch, and whatever runs on this machine."""
    monkeypatch.setattr("deployments.preflight.starts_ray", lambda: True)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    with pytest.raises(ConfigError, match=words):
        check_start({"http_port": "0", "grpc_port": "0", **values})


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("nonsense", "RAY_ADDRESS is no address of Ray"),
        ("127.0.0.1:1", "Ray is said to be at .*:1, .* but does not answer"),
    ],
)
def test_a_ray_that_is_not_there_is_not_waited_for(
    address: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=words):
        check_start({})
