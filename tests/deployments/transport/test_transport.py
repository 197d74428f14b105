"""Streams between routers and workers, on real sockets."""

import asyncio
import dataclasses
import math
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve.exceptions import RayServeException

from deployments.transport import stream_server
from deployments.transport.handle_client import MAX_PINNED, HandleClient
from deployments.transport.messages import (
    MAX_MESSAGE_BYTES,
    VERIFY,
    Answer,
    Call,
    StreamAddress,
    frame,
)
from deployments.transport.stream_client import StreamClient
from deployments.transport.stream_server import StreamServer
from workers.errors import (
    ContextLengthError,
    WorkerFailedError,
    WorkerLostError,
    WorkerTimeoutError,
)
from workers.types import Reply, SamplingParams, VerifyRequest, VerifyResult

Server = StreamServer[VerifyRequest, VerifyResult]
Client = StreamClient[VerifyRequest, VerifyResult]
PATIENCE_S = 10.0


def make_request(seq_id: str = "s", **changes: Any) -> VerifyRequest:
    request = VerifyRequest(seq_id=seq_id, base_len=0, new_tokens=(1, 2, 3), prompt_len=3)
    return dataclasses.replace(request, **changes)


def make_reply(batch: Sequence[VerifyRequest]) -> Reply[VerifyResult]:
    results = tuple(
        VerifyResult(seq_id=request.seq_id, tokens=request.new_tokens) for request in batch
    )
    return Reply(
        replica_id="replica",
        compute_s=0.25,
        num_steps=1,
        num_tokens=3,
        num_prefill_tokens=0,
        results=results,
    )


class Replica:
    """A worker that answers when it is told to, reached by handle or stream."""

    def __init__(self) -> None:
        self.num_by_handle = 0
        self.num_by_stream = 0
        self.released: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.error: Exception | None = None
        self._runs: list[asyncio.Task[None]] = []
        self.server = Server(VERIFY, run=self._run_stream, release=self.released.extend)
        self.address: StreamAddress | None = None

    async def listen(self) -> None:
        self.address = await self.server.start("127.0.0.1", "replica")

    # a WorkerClient, as if by handle

    async def call(
        self,
        replica_id: str | None,  # noqa: ARG002
        batch: Sequence[VerifyRequest],
        *,
        timeout_s: float,  # noqa: ARG002
    ) -> Reply[VerifyResult]:
        self.num_by_handle += 1
        return await self._run(batch)

    async def release(
        self,
        replica_id: str | None,  # noqa: ARG002
        seq_ids: Sequence[str],
    ) -> None:
        self.released += seq_ids

    async def find(self) -> str:
        return "replica"

    async def stream_address(self, replica_id: str) -> StreamAddress:  # noqa: ARG002
        if self.address is None:
            raise WorkerLostError("it is gone")
        return self.address

    def _run_stream(self, batch: Sequence[VerifyRequest], answer: Callable[[Any], None]) -> None:
        self.num_by_stream += 1

        async def run() -> None:
            try:
                answer(await self._run(batch))
            except ContextLengthError as error:
                answer(error)

        self._runs.append(asyncio.create_task(run()))

    async def _run(self, batch: Sequence[VerifyRequest]) -> Reply[VerifyResult]:
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return make_reply(batch)


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    replica = Replica()
    await replica.listen()
    yield replica
    replica.server.close()


@pytest.fixture
async def client(replica: Replica) -> AsyncIterator[Client]:
    client: Client = StreamClient(replica, VERIFY, clock=time.monotonic)
    await client.call(None, [make_request()], timeout_s=PATIENCE_S)
    await until(lambda: "replica" in client._streams)
    yield client
    client.close()


async def until(is_true: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_true():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def raw_stream(
    replica: Replica,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    assert replica.address is not None
    reader, writer = await asyncio.open_connection(replica.address.host, replica.address.port)
    async with asyncio.timeout(PATIENCE_S):
        yield reader, writer
    writer.close()


def token_frame(replica: Replica) -> bytes:
    assert replica.address is not None
    return frame(replica.address.token.encode())


async def read_answer(reader: asyncio.StreamReader) -> Answer[VerifyResult]:
    num_bytes = int.from_bytes(await reader.readexactly(4))
    return VERIFY.decode_answer(await reader.readexactly(num_bytes))


async def has_ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


def cut(client: Client) -> None:
    """As when the replica's process dies."""
    client._streams["replica"].transport.abort()


@pytest.mark.parametrize(
    "request_",
    [
        make_request(),
        make_request(seed=2**64 - 1, base_len=4000, draft_tokens=tuple(range(64))),
        make_request(
            seq_id='"\\ü\n',
            sampling=SamplingParams(temperature=0.1 + 0.2, logit_bias=((3, -100.0), (4, 1e-9))),
        ),
    ],
)
def test_messages_arrive_as_they_were_sent(request_: VerifyRequest) -> None:
    call = Call(kind="run", call_id=7, batch=(request_,), seq_ids=("a",))
    assert VERIFY.decode_call(VERIFY.encode_call(call)[4:]) == call
    result = VerifyResult(seq_id="s", tokens=request_.new_tokens, needs_tokens_from=0)
    answer = Answer(
        call_id=7,
        reply=Reply(
            replica_id="r",
            compute_s=0.1,
            num_steps=1,
            num_tokens=3,
            num_prefill_tokens=0,
            results=(result,),
        ),
    )
    assert VERIFY.decode_answer(VERIFY.encode_answer(answer)[4:]) == answer


async def test_after_the_first_call_a_stream_carries_them(replica: Replica, client: Client) -> None:
    reply = await client.call("replica", [make_request("a"), make_request("b")], timeout_s=1)
    assert [result.seq_id for result in reply.results] == ["a", "b"]
    assert (reply.replica_id, reply.compute_s) == ("replica", 0.25)
    assert (replica.num_by_handle, replica.num_by_stream) == (1, 1)
    await client.call(None, [make_request()], timeout_s=1)  # any replica: Serve chooses
    assert (replica.num_by_handle, replica.num_by_stream) == (2, 1)


async def test_connections_send_at_once_and_notice_a_lost_machine(
    replica: Replica, client: Client
) -> None:
    (served,) = replica.server.streams
    near, far = (
        stream.transport.get_extra_info("socket") for stream in (client._streams["replica"], served)
    )
    for connection in (near, far):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


async def test_calls_do_not_wait_for_each_other(replica: Replica, client: Client) -> None:
    replica.may_answer.clear()
    calls = [
        asyncio.create_task(client.call("replica", [make_request(str(i))], timeout_s=PATIENCE_S))
        for i in range(5)
    ]
    await until(lambda: replica.num_by_stream == 5)
    replica.may_answer.set()
    assert [(await call).results[0].seq_id for call in calls] == [str(i) for i in range(5)]


async def test_a_cancelled_call_releases_its_sequences(replica: Replica, client: Client) -> None:
    replica.may_answer.clear()
    call = asyncio.create_task(client.call("replica", [make_request("s")], timeout_s=PATIENCE_S))
    await until(lambda: replica.num_by_stream == 1)
    call.cancel()
    await until(lambda: replica.released == ["s"])
    replica.may_answer.set()
    assert (await client.call("replica", [make_request("t")], timeout_s=1)).results


async def test_a_call_cancelled_as_its_answer_comes_releases_too(
    replica: Replica, client: Client
) -> None:
    replica.may_answer.clear()
    call = asyncio.create_task(client.call("replica", [make_request("s")], timeout_s=PATIENCE_S))
    await asyncio.sleep(0)
    answer = Answer(call_id=0, reply=make_reply([make_request("s")]))
    client._streams["replica"].frame_received(VERIFY.encode_answer(answer)[4:])
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: replica.released == ["s"])


async def test_a_late_call_is_lost_and_releases(replica: Replica, client: Client) -> None:
    replica.may_answer.clear()
    with pytest.raises(WorkerLostError, match=r"no answer in 0\.05 s"):
        await client.call("replica", [make_request("s")], timeout_s=0.05)
    await until(lambda: replica.released == ["s"])


async def test_an_error_of_the_worker_loses_the_call_alone(
    replica: Replica, client: Client
) -> None:
    replica.error = ContextLengthError("too long by 3")
    with pytest.raises(WorkerFailedError, match="ContextLengthError: too long by 3"):
        await client.call("replica", [make_request()], timeout_s=1)
    replica.error = None
    assert (await client.call("replica", [make_request()], timeout_s=1)).results
    assert replica.num_by_stream == 2


async def test_a_lost_connection_loses_its_calls_and_is_replaced(
    replica: Replica, client: Client
) -> None:
    replica.may_answer.clear()
    call = asyncio.create_task(client.call("replica", [make_request("s")], timeout_s=PATIENCE_S))
    await until(lambda: replica.num_by_stream == 1)
    cut(client)
    with pytest.raises(WorkerLostError, match="the connection ended"):
        await call
    await until(lambda: replica.released == ["s"])
    replica.may_answer.set()
    await client.call("replica", [make_request()], timeout_s=1)
    assert replica.num_by_handle == 2
    await until(lambda: "replica" in client._streams)
    await client.call("replica", [make_request()], timeout_s=1)
    assert (replica.num_by_handle, replica.num_by_stream) == (2, 2)


async def test_releases_go_the_same_way_and_in_order(replica: Replica, client: Client) -> None:
    replica.may_answer.clear()
    call = asyncio.create_task(client.call("replica", [make_request("s")], timeout_s=PATIENCE_S))
    await asyncio.sleep(0)
    await client.release("replica", ["s"])
    await until(lambda: replica.released == ["s"])
    assert replica.num_by_stream == 1  # it was with the worker before the release
    replica.may_answer.set()
    await call
    await client.release("another", ["t"])  # no stream: by handle
    assert replica.released == ["s", "t"]


async def test_without_a_stream_the_handles_serve_on() -> None:
    replica = Replica()
    client: Client = StreamClient(replica, VERIFY, clock=time.monotonic)
    for _ in range(3):
        await client.call("replica", [make_request()], timeout_s=1)
        await until(lambda: not client._opening)
    assert (replica.num_by_handle, replica.num_by_stream) == (3, 0)
    client.close()


@pytest.mark.parametrize(
    "sent",
    [
        frame(b"0" * 64) + VERIFY.encode_call(Call(kind="release", seq_ids=("s",))),
        VERIFY.encode_call(Call(kind="release", seq_ids=("s",))),
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
    ],
    ids=["wrong token", "no token", "another protocol", "nothing"],
)
async def test_strangers_are_not_served(replica: Replica, sent: bytes) -> None:
    async with raw_stream(replica) as (reader, writer):
        writer.write(sent)
        writer.write_eof()
        assert await has_ended(reader)
    assert replica.released == []


@pytest.mark.parametrize(
    "sent",
    [frame(b'{"kind": "run", "batch": [{"seq_id": 3}]}'), (MAX_MESSAGE_BYTES + 1).to_bytes(4)],
    ids=["not a call", "too long"],
)
async def test_what_is_no_message_ends_the_stream(replica: Replica, sent: bytes) -> None:
    async with raw_stream(replica) as (reader, writer):
        writer.write(token_frame(replica) + sent)
        assert await has_ended(reader)
    assert replica.num_by_stream == 0


async def test_messages_may_arrive_in_pieces_or_at_once(replica: Replica) -> None:
    calls = [VERIFY.encode_call(Call(kind="run", batch=(make_request(i),))) for i in "ab"]
    async with raw_stream(replica) as (reader, writer):
        for piece in token_frame(replica) + calls[0]:
            writer.write(bytes([piece]))
            await asyncio.sleep(0)
        writer.write(calls[1] + VERIFY.encode_call(Call(kind="release", seq_ids=("c",))))
        answers = [await read_answer(reader) for _ in calls]
        assert [a.reply and a.reply.results[0].seq_id for a in answers] == ["a", "b"]
        assert replica.released == ["c"]


async def test_who_reads_no_answers_is_not_heard(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_paused = asyncio.Event()
    pause_writing = stream_server._Stream.pause_writing

    def pause(stream: stream_server._Stream[Any, Any]) -> None:
        pause_writing(stream)
        has_paused.set()

    monkeypatch.setattr(stream_server._Stream, "pause_writing", pause)
    long = make_request(new_tokens=tuple(range(50_000)))
    num_calls = 100  # more than the kernel takes on
    async with raw_stream(replica) as (reader, writer):
        writer.write(token_frame(replica))
        for call_id in range(num_calls):
            writer.write(VERIFY.encode_call(Call(kind="run", call_id=call_id, batch=(long,))))
        await has_paused.wait()
        assert replica.num_by_stream < num_calls
        answered = {(await read_answer(reader)).call_id for _ in range(num_calls)}
        assert answered == set(range(num_calls))


class TestCallsThatFailAlone:
    """A message that cannot be written or read ends its own call; the stream carries the others."""

    async def check_others(self, replica: Replica, client: Client) -> None:
        (stream,) = client._streams.values()
        assert stream.is_open
        before = replica.num_by_stream
        assert (await client.call("replica", [make_request()], timeout_s=PATIENCE_S)).results
        assert replica.num_by_stream == before + 1

    async def test_a_call_that_is_too_long(
        self, replica: Replica, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("deployments.transport.messages.MAX_MESSAGE_BYTES", 200)
        with pytest.raises(WorkerFailedError, match="cannot be written: a message of"):
            await client.call(
                "replica", [make_request(new_tokens=(1,) * 500)], timeout_s=PATIENCE_S
            )
        await self.check_others(replica, client)

    async def test_a_call_that_the_worker_cannot_read(
        self, replica: Replica, client: Client
    ) -> None:
        wrong: Any = make_request(seed="seven")
        with (
            pytest.warns(UserWarning, match="Expected `int`"),
            pytest.raises(WorkerFailedError, match="valid integer"),
        ):
            await client.call("replica", [wrong], timeout_s=PATIENCE_S)
        await self.check_others(replica, client)

    async def test_an_answer_that_is_too_long(
        self, replica: Replica, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replica.may_answer.clear()
        request = make_request(new_tokens=(1,) * 500)
        call = asyncio.create_task(client.call("replica", [request], timeout_s=PATIENCE_S))
        await until(lambda: replica.num_by_stream == 1)
        monkeypatch.setattr("deployments.transport.messages.MAX_MESSAGE_BYTES", 300)
        replica.may_answer.set()
        with pytest.raises(WorkerFailedError, match="a message of"):
            await call
        await self.check_others(replica, client)

    async def test_an_answer_that_cannot_be_read(
        self, replica: Replica, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (stream,) = client._streams.values()
        with monkeypatch.context() as patch:
            broken = frame(b'{"call_id": 2, "reply": {"replica_id": null}}')
            patch.setattr(VERIFY, "encode_answer", lambda _: broken)
            assert next(stream._call_ids) == 1
            with pytest.raises(WorkerFailedError, match="an answer cannot be read"):
                await client.call("replica", [make_request()], timeout_s=PATIENCE_S)
        await self.check_others(replica, client)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_numbers_that_are_not_finite_arrive_as_they_are(self, value: float) -> None:
        reply = dataclasses.replace(make_reply([make_request()]), compute_s=value)
        arrived = VERIFY.decode_answer(VERIFY.encode_answer(Answer(call_id=1, reply=reply))[4:])
        assert arrived.reply is not None
        assert repr(arrived.reply.compute_s) == repr(value)


async def test_replicas_that_have_gone_are_not_remembered(replica: Replica) -> None:
    """Every call is answered by another replica, as over months of updates."""
    names = [f"replica-{number}" for number in range(50)]
    now = 0.0
    client: Client = StreamClient(replica, VERIFY, clock=lambda: now)
    for name in names:
        client._start_opening(name)
        await until(lambda: not client._opening)
        now += 60.0
    assert len(client._streams) + len(client._not_before) <= 2
    client.close()


async def test_a_replica_is_found_with_its_stream(replica: Replica) -> None:
    client: Client = StreamClient(replica, VERIFY, clock=time.monotonic)
    assert await client.find() == "replica"
    assert await client.find() == "replica"
    await client.call("replica", [make_request()], timeout_s=PATIENCE_S)
    assert (replica.num_by_stream, replica.num_by_handle) == (1, 0)
    client.close()


class Handle:
    """A Serve handle whose calls end as told, and which counts what is bound to it."""

    def __init__(self, error: Exception) -> None:
        self.num_bound = 0
        self.was_cancelled = False
        self._error = error

    def options(self, **options: Any) -> "Handle":
        self.num_bound += "session_id" in options
        return self

    def remote(self, *_: object) -> "Handle":
        return self

    def cancel(self) -> None:
        self.was_cancelled = True

    def __await__(self) -> Any:
        raise self._error
        yield


class TestHandles:
    def client(self, error: Exception) -> tuple[Handle, Any]:
        handle: Any = Handle(error)
        return handle, HandleClient(handle, "verify")

    @pytest.mark.parametrize(
        "error",
        [
            RuntimeError("tandem::sample() Expected a value"),
            WorkerFailedError("the worker has failed"),
            RayTaskError("verify", "a traceback", ValueError("a cause")),
        ],
    )
    async def test_what_a_replica_raises_may_be_by_what_it_was_sent(self, error: Exception) -> None:
        _, client = self.client(error)
        with pytest.raises(WorkerFailedError, match="verify failed"):
            await client.call("replica", [make_request()], timeout_s=PATIENCE_S)

    @pytest.mark.parametrize(
        "error",
        [ActorDiedError(), RayServeException("no replica"), ConnectionResetError("reset")],
    )
    async def test_a_replica_that_is_gone_is_lost_without_a_word(self, error: Exception) -> None:
        _, client = self.client(error)
        with pytest.raises(WorkerLostError) as lost:
            await client.call("replica", [make_request()], timeout_s=PATIENCE_S)
        assert not isinstance(lost.value, WorkerFailedError)

    async def test_a_replica_that_is_not_reached_tells_nothing_of_the_call(self) -> None:
        _, client = self.client(ActorUnavailableError("unavailable", None))
        with pytest.raises(WorkerTimeoutError, match="reached no replica"):
            await client.call("replica", [make_request()], timeout_s=PATIENCE_S)

    async def test_a_replica_that_ends_by_no_fault_of_a_call_says_so(self) -> None:
        _, client = self.client(WorkerLostError("another rank is lost"))
        with pytest.raises(WorkerLostError, match="another rank") as lost:
            await client.call("replica", [make_request()], timeout_s=PATIENCE_S)
        assert not isinstance(lost.value, WorkerFailedError)

    async def test_handles_of_replicas_that_have_gone_are_let_go(self) -> None:
        handle, client = self.client(ActorDiedError())
        for number in range(2 * MAX_PINNED):
            with pytest.raises(WorkerLostError):
                await client.release(f"replica-{number}", ["s"])
        assert handle.num_bound == 2 * MAX_PINNED
        assert client._method_of.cache_info().currsize == MAX_PINNED
