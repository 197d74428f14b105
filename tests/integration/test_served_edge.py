"""What only Serve's own proxies can show: what becomes of hostile headers, bodies and messages."""

import grpc
import httpx
import pytest

from deployments.api.grpc_proxy import malformed
from tests.integration.conftest import Deploy, Served, request


@pytest.fixture
def served(deploy: Deploy) -> Served:
    return deploy()


@pytest.mark.parametrize(
    "name",
    [
        "x-request-id",
        "x-session-id",
        "serve_multiplexed_model_id",
        "x-request-timeout-seconds",
        "x-request-disconnect-disabled",
    ],
)
def test_a_header_that_serve_cannot_read_is_400(
    name: str, served: Served, http: httpx.Client
) -> None:
    headers = [(name.encode(), b"\xe9")]
    response = http.post(f"{served.url}/v1/completions", json=request("a"), headers=headers)
    assert response.status_code == 400
    assert name in response.json()["error"]["message"]


async def test_a_stream_whose_time_is_over_says_so(served: Served, http: httpx.Client) -> None:
    fields = {"max_tokens": 4000, "ignore_eos": True, "stream": True}
    response = http.post(
        "/v1/completions",
        json=request("def f(", **fields),
        headers={"x-request-timeout-seconds": "0.5"},
    )
    assert response.status_code == 200
    *_, event, done = response.text.strip().split("\n\n")
    assert '"code":"timeout"' in event
    assert done == "data: [DONE]"
    await served.wait_until_nothing_is_held()


def test_a_body_that_is_too_long_is_413(served: Served, http: httpx.Client) -> None:
    body = request("a " * 10_000_000)
    response = http.post(f"{served.url}/v1/completions", json=body)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"


def test_it_is_healthy_and_ready(served: Served, http: httpx.Client) -> None:
    for path in ("/health", "/ready"):
        assert http.get(f"{served.url}{path}").status_code == 200
        head = http.head(f"{served.url}{path}")
        assert (head.status_code, head.content) == (200, b"")


async def test_a_message_that_is_no_request_is_told_so(served: Served) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/tandem.v1.Generation/Generate")(b"\xff", timeout=30)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == malformed("GenerateRequest")
