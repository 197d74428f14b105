"""Our part of Serve's gRPC proxy, on Serve's own server without a replica behind it."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from ray.serve._private.grpc_util import gRPCGenericServer
from ray.serve.exceptions import RequestCancelledError, gRPCStatusError

from deployments.api import grpc_proxy
from deployments.api.grpc_proxy import add_generation_to_server, malformed
from deployments.api.serve_log import GRPC_LOGGER, SERVE_LOGGER, leave_out_told_errors
from deployments.api.tandem_pb2 import GenerateChunk, GenerateRequest, GenerateResponse

SERVICE = "/tandem.v1.Generation"


def echoing(*, service_method: str, streaming_type: Any) -> Callable[..., Any]:  # noqa: ARG001
    """What Serve makes of a method, but that it answers by itself: with the request's text."""

    async def unary(request: GenerateRequest, context: Any) -> bytes:  # noqa: ARG001
        return GenerateResponse(text=request.text).SerializeToString()

    async def stream(request: GenerateRequest, context: Any) -> AsyncIterator[bytes]:
        assert context.peer()
        for word in ("", *request.text.split()):
            yield GenerateChunk(text=word).SerializeToString()

    return stream if streaming_type.name == "UNARY_STREAM" else unary


@asynccontextmanager
async def channel_of(factory: Callable[..., Any]) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server of Serve's whose handlers the factory makes."""
    server = gRPCGenericServer(factory)
    port = server.add_insecure_port("127.0.0.1:0")
    add_generation_to_server(Mock(), server)
    assert server.service_handler_factory is factory
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    async with channel_of(echoing) as channel:
        yield channel


async def call(channel: grpc.aio.Channel, method: str, raw: bytes) -> list[bytes]:
    """The raw answers to raw bytes."""
    if method == "Generate":
        return [await channel.unary_unary(f"{SERVICE}/{method}")(raw, timeout=10)]
    stream = channel.unary_stream(f"{SERVICE}/{method}")(raw, timeout=10)
    return [message async for message in stream]


async def test_requests_arrive_read(channel: grpc.aio.Channel) -> None:
    raw = GenerateRequest(text="a b").SerializeToString()
    (whole,) = await call(channel, "Generate", raw)
    assert GenerateResponse.FromString(whole).text == "a b"
    chunks = await call(channel, "GenerateStream", raw)
    assert [GenerateChunk.FromString(chunk).text for chunk in chunks] == ["a", "b"]


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize("raw", [b"\xff", b"\x12\x05ab", b"\x12\x02\xff\xfe", b"{}" * 50])
async def test_bytes_that_are_no_request_are_told_so(
    method: str, raw: bytes, channel: grpc.aio.Channel
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, method, raw)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == malformed("GenerateRequest")


async def test_a_message_that_no_app_would_take_is_not_handed_on(
    channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_proxy, "MAX_MESSAGE_BYTES", 10)
    with pytest.raises(grpc.aio.AioRpcError, match="12 bytes; at most 10") as caught:
        await call(channel, "Generate", GenerateRequest(text="a" * 10).SerializeToString())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_unknown_method_is_unimplemented(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(f"{SERVICE}/Other")(b"", timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_what_ends_a_call_whose_client_has_left_is_not_logged() -> None:
    """Serve's handler raises when it learns that the client is gone; nobody waits for it."""
    has_begun, has_ended = asyncio.Event(), asyncio.Event()

    def raising(*, service_method: str, streaming_type: Any) -> Callable[..., Any]:  # noqa: ARG001
        async def stream(request: GenerateRequest, context: Any) -> AsyncIterator[bytes]:  # noqa: ARG001
            yield GenerateChunk(text="a").SerializeToString()
            has_begun.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                has_ended.set()
                raise RuntimeError("the request was cancelled") from None

        return stream

    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with channel_of(raising) as channel:
        raw = GenerateRequest(text="a").SerializeToString()
        call = channel.unary_stream(f"{SERVICE}/GenerateStream")(raw)
        await call.read()
        await has_begun.wait()
        call.cancel()
        await has_ended.wait()
        await asyncio.sleep(0)
    gc.collect()
    assert complaints == []


async def test_a_client_that_stops_reading_holds_up_no_replica() -> None:
    """Nor does it lose anything: its text waits for it here."""
    words = [f"{number:010000}" for number in range(100)]  # more than gRPC sends unread
    has_ended = asyncio.Event()

    def writing(*, service_method: str, streaming_type: Any) -> Callable[..., Any]:  # noqa: ARG001
        async def stream(request: GenerateRequest, context: Any) -> AsyncIterator[bytes]:  # noqa: ARG001
            for word in words:
                yield GenerateChunk(text=word).SerializeToString()
                await asyncio.sleep(0)
            has_ended.set()

        return stream

    async with channel_of(writing) as channel:
        raw = GenerateRequest(text="a").SerializeToString()
        answers = aiter(channel.unary_stream(f"{SERVICE}/GenerateStream")(raw, timeout=30))
        chunks = [await anext(answers)]
        async with asyncio.timeout(10):
            await has_ended.wait()
        chunks += [chunk async for chunk in answers]
    assert [GenerateChunk.FromString(chunk).text for chunk in chunks] == words


async def test_a_refused_stream_leaves_no_traceback_in_serves_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Other errors are logged as before."""
    leave_out_told_errors()
    leave_out_told_errors()
    logger = logging.getLogger(SERVE_LOGGER)
    for error in (
        gRPCStatusError(ValueError("told"), grpc.StatusCode.INVALID_ARGUMENT),
        RequestCancelledError("told"),
        ValueError("a defect"),
    ):
        try:
            raise error
        except Exception:
            logger.exception("a request failed")
    logger.warning("something else")
    for method in ("/grpc.health.v1.Health/Check", "/tandem.v1.Generation/Generate"):
        logger.warning("%s OK 2.0ms", method, extra={"serve_access_log": True})
    assert [record.getMessage() for record in caplog.records] == [
        "a request failed",
        "something else",
        "/tandem.v1.Generation/Generate OK 2.0ms",
    ]
    assert "a defect" in caplog.text
    assert "told" not in caplog.text


@pytest.mark.parametrize(
    ("message", "is_logged"),
    [
        ('Failed "execute_batch": (<SendMessageOperation>,)', False),
        ("Failed grpc_call_start_batch: 8 with grpc_call_error value: 'TOO_MANY'", True),
    ],
)
def test_an_answer_that_comes_too_late_leaves_no_traceback_in_grpcs_log(
    message: str, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A call that is over cannot be answered; one that is not may show a defect."""
    leave_out_told_errors()
    try:
        raise grpc.aio.InternalError(message)
    except grpc.aio.InternalError:
        logging.getLogger(GRPC_LOGGER).exception("raised in core")
    assert ("raised in core" in caplog.text) is is_logged
