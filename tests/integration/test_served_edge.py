"""What only Serve's own proxies can show: what becomes of hostile headers, bodies and messages."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from deployments.api.grpc_proxy import malformed
from deployments.api.tandem_pb2 import (
    DetokenizeRequest,
    GenerateRequest,
    ListModelsRequest,
    TokenizeRequest,
)
from deployments.api.tandem_pb2_grpc import GenerationStub
from tests.integration.conftest import KEY, METADATA, MODEL, Served, request

SERVICE = "tandem.v1.Generation"
NUM_SLOW = 10
NUM_LONG = 400
"""Tokens of a text that fits into no buffer between the proxy and its client."""
SMALL_BUFFER = 2048
BUFFERED = 150_000
"""Bytes that the proxy and the system keep of an answer whose client does not read."""


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


async def test_clients_that_stop_reading_hold_nobody_up(served: Served) -> None:
    """Nor do they hold a place, or blocks: their texts wait for them in Serve's proxy."""
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(reading_little(served)) for _ in range(NUM_SLOW)]
        async with served.openai() as client:
            completion = await client.completions.create(**request("def f("))
        assert completion.choices[0].text
        await served.wait_until_nothing_is_held()
        text = await streams[-1].read()
    assert text.count(b'"text":') >= NUM_LONG
    assert text.count(b"data: [DONE]") == 1
    assert len(text) > BUFFERED


@asynccontextmanager
async def reading_little(served: Served) -> AsyncIterator[asyncio.StreamReader]:
    """A client of a long text with hardly any buffers, which has read its first bytes only."""
    asked = request(
        "def f(",
        max_tokens=NUM_LONG,
        ignore_eos=True,
        stream=True,
        logprobs=5,
        speculation={"mode": "off"},  # an event for each token
    )
    body = json.dumps(asked).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {KEY}\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", served.http_port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=SMALL_BUFFER)
        writer.write(head.encode() + body)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        yield reader
        writer.close()


async def test_a_message_that_is_no_request_is_told_so(served: Served) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/tandem.v1.Generation/Generate")(
                b"\xff", metadata=METADATA, timeout=30
            )
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == malformed("GenerateRequest")


async def test_health_tokens_and_models_are_told_through_the_proxy(served: Served) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        for service in ("", SERVICE):
            request = HealthCheckRequest(service=service)
            response = await HealthStub(channel).Check(request, timeout=30)
            assert response.status == HealthCheckResponse.SERVING
        watch = HealthStub(channel).Watch(HealthCheckRequest(), timeout=30)
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        watch.cancel()
        stub = GenerationStub(channel)
        tokenized = await stub.Tokenize(
            TokenizeRequest(prompt="def f(x):"), metadata=METADATA, timeout=30
        )
        text = await stub.Detokenize(
            DetokenizeRequest(tokens=tokenized.tokens), metadata=METADATA, timeout=30
        )
        assert text.prompt == "def f(x):"
        listed = await stub.ListModels(ListModelsRequest(), metadata=METADATA, timeout=30)
        assert [model.id for model in listed.models] == [MODEL]


def test_reflection_names_the_services(served: Served) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
        pool = DescriptorPool(database)
        assert "Generate" in pool.FindServiceByName(SERVICE).methods_by_name


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_a_call_whose_time_is_over_leaves_nothing(method: str, served: Served) -> None:
    request = GenerateRequest(text="def f(", max_tokens=4000, ignore_eos=True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        call = getattr(GenerationStub(channel), method)(request, metadata=METADATA, timeout=0.5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call if method == "Generate" else anext(_all_of(call)))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await served.wait_until_nothing_is_held()


async def _all_of(call: Any) -> AsyncIterator[list[Any]]:
    yield [message async for message in call]
