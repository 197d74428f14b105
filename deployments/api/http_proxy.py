"""Middleware of ours in Serve's HTTP proxy: it checks the headers that Serve itself obeys.

Serve takes orders from any client by headers. It answers 500 in plain text where one is no UTF-8,
lets a client switch off that its leaving ends its request, and cuts a stream whose time is over
without a word. Here such a header is refused, dropped, or handed on for the app to obey.
"""

import math
from collections.abc import Mapping

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.api.errors import error_response
from workers.errors import InvalidRequestError

MIDDLEWARES_FUNCTION = f"{__name__}.middlewares"
"""The import path that RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names."""

_TIMEOUT = "x-request-timeout-seconds"
_HANDED_ON_TIMEOUT = "x-tandem-timeout-seconds"
_DISCONNECT_DISABLED = "x-request-disconnect-disabled"
_OBEYED = frozenset(
    {
        _TIMEOUT,
        _DISCONNECT_DISABLED,
        "serve-multiplexed-model-id",
        "traceparent",
        "x-request-id",
        "x-session-id",
    }
)
"""Headers that Serve reads, as `_normalized` spells them."""


def middlewares() -> list[Middleware]:
    """Called by a proxy when it starts."""
    return [Middleware(ServeHeaders)]


class ServeHeaders:
    """ASGI middleware in front of Serve's own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "headers" not in scope:
            await self._app(scope, receive, send)
            return
        try:
            headers = _checked(scope["headers"])
        except InvalidRequestError as error:
            await error_response(error)(scope, receive, send)
            return
        await self._app({**scope, "headers": headers}, receive, send)


def request_timeout_s(headers: Mapping[str, str]) -> float | None:
    """The seconds that the client waits for its request; None if it does not say.

    As Serve means it, a time that is not above 0 is none. Raises InvalidRequestError.
    """
    stated = headers.get(_HANDED_ON_TIMEOUT, headers.get(_TIMEOUT))
    if stated is None:
        return None
    try:
        timeout_s = float(stated)
    except ValueError:
        timeout_s = math.nan
    if not math.isfinite(timeout_s):
        raise InvalidRequestError(
            f"the header {_TIMEOUT} is {stated[:40]!r}: it must be a number of seconds, like 30"
        )
    return timeout_s if timeout_s > 0 else None


def _checked(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers that Serve may see; raises InvalidRequestError for one that it cannot read."""
    kept = []
    for name, value in headers:
        obeyed = _normalized(name)
        if obeyed in _OBEYED and not _is_printable(value):
            raise InvalidRequestError(
                f"the header {name.decode('latin-1')} is {value[:40]!r}: it must be of printable "
                "ASCII characters"
            )
        if obeyed == _TIMEOUT:
            kept.append((_HANDED_ON_TIMEOUT.encode(), value))
        elif obeyed != _DISCONNECT_DISABLED:
            kept.append((name, value))
    return kept


def _normalized(name: bytes) -> str:
    return name.decode("latin-1").lower().replace("_", "-")


def _is_printable(value: bytes) -> bool:
    return all(32 <= byte < 127 for byte in value)
