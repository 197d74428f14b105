"""What our middleware in Serve's HTTP proxy lets through, and what it refuses."""

from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from deployments.api.http_proxy import middlewares, request_timeout_s
from deployments.builder import SERVE_ENVIRONMENT


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the headers that came through."""
    headers = dict(Request(scope).headers)
    await JSONResponse(headers)(scope, receive, send)


@pytest.fixture
def client() -> httpx.AsyncClient:
    (middleware,) = middlewares()
    app = middleware.cls(echo, *middleware.args, **middleware.kwargs)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def test_serve_is_told_of_it() -> None:
    path = SERVE_ENVIRONMENT["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"]
    assert path == f"{middlewares.__module__}.{middlewares.__name__}"


@pytest.mark.parametrize(
    "name",
    [
        "X-Request-Id",
        "x-session-id",
        "x_session_id",
        "serve_multiplexed_model_id",
        "serve-multiplexed-model-id",
        "x-request-timeout-seconds",
        "x-request-disconnect-disabled",
        "traceparent",
    ],
)
@pytest.mark.parametrize("value", [b"\xe9", "é".encode(), b"\xff\xfe", b"a\tb"])
async def test_what_serve_cannot_read_is_400(
    name: str, value: bytes, client: httpx.AsyncClient
) -> None:
    response = await client.get("/", headers=[(name.encode(), value)])
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert f"the header {name.lower()} is" in error["message"]


async def test_other_headers_pass_as_they_are(client: httpx.AsyncClient) -> None:
    sent: Any = [(b"x-request-id", b"abc 1"), (b"x-other", b"\xe9"), (b"x-session-id", b"s")]
    headers = (await client.get("/", headers=sent)).json()
    assert (headers["x-request-id"], headers["x-session-id"]) == ("abc 1", "s")
    assert headers["x-other"] == "é"


async def test_a_client_cannot_switch_its_own_disconnect_off(client: httpx.AsyncClient) -> None:
    headers = (await client.get("/", headers={"X-Request-Disconnect-Disabled": "?1"})).json()
    assert "x-request-disconnect-disabled" not in headers


async def test_a_clients_time_is_kept_from_serve_and_reaches_the_app(
    client: httpx.AsyncClient,
) -> None:
    headers = (await client.get("/", headers={"X-Request-Timeout-Seconds": "2.5"})).json()
    assert "x-request-timeout-seconds" not in headers
    assert request_timeout_s(Headers(headers)) == 2.5
    assert request_timeout_s(Headers({})) is None


async def test_other_protocols_pass() -> None:
    (middleware,) = middlewares()
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001
        seen.append(scope)

    async def nothing(*_: Any) -> Any:
        return {}

    await middleware.cls(app)({"type": "lifespan"}, nothing, nothing)
    assert seen == [{"type": "lifespan"}]
