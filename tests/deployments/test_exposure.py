"""Who may start without a token."""

import pytest

from deployments.args import AppArgs
from deployments.exposure import is_loopback, refuse_strangers
from workers.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "addresses"),
    [
        ({"http_host": "0.0.0.0"}, ["127.0.0.1"]),
        ({"http_host": "192.0.2.7"}, ["127.0.0.1"]),
        ({"http_host": "::"}, ["127.0.0.1"]),
        ({}, ["192.0.2.7"]),
        ({}, ["127.0.0.1", "192.0.2.7"]),
    ],
)
def test_strangers_who_need_no_token_are_refused(
    options: dict[str, str], addresses: list[str]
) -> None:
    with pytest.raises(ConfigError, match=r"RAY_AUTH_MODE=token.*allow_unauthenticated_cluster"):
        refuse_strangers(AppArgs(**options), has_token=False, addresses=addresses)
    refuse_strangers(AppArgs(**options), has_token=True, addresses=addresses)
    allowed = AppArgs(**options, allow_unauthenticated_cluster=True)
    refuse_strangers(allowed, has_token=False, addresses=addresses)


def test_whoever_listens_on_this_machine_alone_needs_no_token() -> None:
    refuse_strangers(AppArgs(), has_token=False, addresses=["127.0.0.1"])


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.com", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
