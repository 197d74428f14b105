"""API keys at the edge: who sends a request, by HTTP's header or gRPC's metadata `authorization`.

Both carry `Bearer <key>`. What neither runs nor reads a model is open to all.
"""

import math
from collections.abc import Iterable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api.errors import error_response
from deployments.router.request import SOMEBODY, Caller
from deployments.router.service import GenerationService
from deployments.router.tenants.account import RateLimit, RateLimits
from deployments.router.tenants.keys import KeyRing
from workers.errors import AuthenticationError

OPEN_PATHS = frozenset({"/health", "/ready", "/version"})
"""Paths for probes, which have no key."""
SCHEME = "bearer"
REQUEST_ID = "x-request-id"
_CALLER = "tandem_caller"


def authenticate(ring: KeyRing, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
    """The caller that headers or metadata name by an API key; raises AuthenticationError.

    The names are in small letters. Of several of a name the first counts.
    """
    values: dict[str, str] = {}
    for name, value in metadata:
        text = value.decode("latin-1") if isinstance(value, bytes) else value
        values.setdefault(name, text)
    request_id = values.get(REQUEST_ID, "")
    if ring.is_open:
        return Caller(request_id=request_id)
    scheme, _, key = values.get("authorization", "").strip().partition(" ")
    if not scheme:
        raise AuthenticationError(
            "the request has no API key; send it as Authorization: Bearer <key>"
        )
    if scheme.lower() != SCHEME or not key.strip():
        raise AuthenticationError("Authorization must be Bearer, a space and an API key")
    tenant = ring.find(key.strip())
    if tenant is None:
        raise AuthenticationError("the API key is not valid here")
    return Caller(tenant=tenant, request_id=request_id)


def caller_of(scope: Scope) -> Caller:
    """The caller of the request of this scope, as RequireKey has found out."""
    caller: Caller = scope.get(_CALLER, SOMEBODY)
    return caller


class RequireKey:
    """ASGI middleware: lets those in who have a key, and tells them where its limits stand.

    It answers before a body is read.
    """

    def __init__(self, app: ASGIApp, *, service: GenerationService) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _path(scope) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers = [(name.decode("latin-1"), value) for name, value in scope["headers"]]
        try:
            caller = authenticate(self._service.keys.ring, headers)
        except AuthenticationError as error:
            await error_response(error)(scope, receive, send)
            return

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                limits = self._service.rate_limits(caller.tenant)
                MutableHeaders(scope=message).update(rate_limit_headers(limits))
            await send(message)

        await self._app({**scope, _CALLER: caller}, receive, send_with_limits)


def _path(scope: Scope) -> str:
    """The path as routes have it, below where the app is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def rate_limit_headers(limits: RateLimits) -> dict[str, str]:
    """OpenAI's headers, for those limits that a key has."""
    headers: dict[str, str] = {}
    for name, limit in (("requests", limits.requests), ("tokens", limits.tokens)):
        if limit is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(limit.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(limit.remaining)
            headers[f"x-ratelimit-reset-{name}"] = _duration(limit)
    return headers


def _duration(limit: RateLimit) -> str:
    """The time until a limit is reset as OpenAI writes it: 120ms, 12s, 1m30s."""
    if limit.reset_s < 1:
        return f"{math.ceil(limit.reset_s * 1000)}ms"
    minutes, seconds = divmod(math.ceil(limit.reset_s), 60)
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
