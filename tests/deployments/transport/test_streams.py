"""Streams between routers and workers, on real sockets."""

import asyncio
import dataclasses
import math
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from deployments.transport import stream_server
from deployments.transport.messages import (
    MAX_MESSAGE_BYTES,
    VERIFY,
    Answer,
    Call,
    ReplicaReport,
    StreamAddress,
    frame,
)
from deployments.transport.stream_server import StreamServer
from deployments.transport.worker_streams import WorkerStreams
from tests.deployments.loops import wait_until
from workers.errors import (
    ContextLengthError,
    WorkerFailedError,
    WorkerLostError,
)
from workers.types import Reply, SamplingParams, VerifyRequest, VerifyResult

Server = StreamServer[VerifyRequest, VerifyResult]
Client = WorkerStreams[VerifyRequest, VerifyResult]
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
    """A worker that answers when it is told to."""

    def __init__(self, name: str = "replica") -> None:
        self.name = name
        self.num_cached_tokens = 0
        self.steps_version = 0
        self.num_calls = 0
        self.released: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.error: Exception | None = None
        self._runs: list[asyncio.Task[None]] = []
        self.server = Server(VERIFY, run=self._start_run, release=self.released.extend)
        self.address: StreamAddress | None = None

    async def listen(self) -> None:
        self.address = await self.server.start("127.0.0.1", self.name)

    @property
    def report(self) -> ReplicaReport:
        assert self.address is not None
        return ReplicaReport(address=self.address, num_cached_tokens=self.num_cached_tokens)

    def _start_run(self, batch: Sequence[VerifyRequest], answer: Callable[[Any], None]) -> None:
        self.num_calls += 1

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
        return dataclasses.replace(
            make_reply(batch), replica_id=self.name, steps_version=self.steps_version
        )


class Cluster:
    """A directory of replicas that come and go."""

    def __init__(self, *replicas: Replica) -> None:
        self.listed = list(replicas)
        self.num_asked = 0
        self.num_new_steps = 0

    def note_new_steps(self) -> None:
        self.num_new_steps += 1

    async def replicas(self) -> list[ReplicaReport]:
        self.num_asked += 1
        if not self.listed:
            raise WorkerLostError("nobody is there")
        return [replica.report for replica in self.listed]


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    replica = Replica()
    await replica.listen()
    yield replica
    replica.server.close()


@pytest.fixture
async def client(replica: Replica) -> AsyncIterator[Client]:
    client: Client = WorkerStreams(Cluster(replica), VERIFY)
    await wait_until(lambda: "replica" in client._streams)
    yield client
    client.close()


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


async def test_a_stream_carries_calls(replica: Replica, client: Client) -> None:
    for replica_id in ("replica", None, "one that is gone"):
        reply = await client.call(replica_id, [make_request("a"), make_request("b")], timeout_s=1)
        assert [result.seq_id for result in reply.results] == ["a", "b"]
        assert (reply.replica_id, reply.compute_s) == ("replica", 0.25)
    assert replica.num_calls == 3
    assert len(replica.server.streams) == 1


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
    await wait_until(lambda: replica.num_calls == 5)
    replica.may_answer.set()
    assert [(await call).results[0].seq_id for call in calls] == [str(i) for i in range(5)]


async def test_a_cancelled_call_releases_its_sequences(replica: Replica, client: Client) -> None:
    replica.may_answer.clear()
    call = asyncio.create_task(client.call("replica", [make_request("s")], timeout_s=PATIENCE_S))
    await wait_until(lambda: replica.num_calls == 1)
    call.cancel()
    await wait_until(lambda: replica.released == ["s"])
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
    await wait_until(lambda: replica.released == ["s"])


async def test_a_late_call_is_lost_and_releases(replica: Replica, client: Client) -> None:
    replica.may_answer.clear()
    with pytest.raises(WorkerLostError, match=r"no answer in 0\.05 s"):
        await client.call("replica", [make_request("s")], timeout_s=0.05)
    await wait_until(lambda: replica.released == ["s"])


async def test_an_error_of_the_worker_loses_the_call_alone(
    replica: Replica, client: Client
) -> None:
    replica.error = ContextLengthError("too long by 3")
    with pytest.raises(WorkerFailedError, match="ContextLengthError: too long by 3"):
        await client.call("replica", [make_request()], timeout_s=1)
    replica.error = None
    assert (await client.call("replica", [make_request()], timeout_s=1)).results
    assert replica.num_calls == 2


async def test_a_lost_connection_loses_its_calls_and_is_replaced(
    replica: Replica, client: Client
) -> None:
    replica.may_answer.clear()
    call = asyncio.create_task(client.call("replica", [make_request("s")], timeout_s=PATIENCE_S))
    await wait_until(lambda: replica.num_calls == 1)
    cut(client)
    with pytest.raises(WorkerLostError, match="the connection ended"):
        await call
    await wait_until(lambda: replica.released == ["s"])
    replica.may_answer.set()
    await client.call(None, [make_request()], timeout_s=PATIENCE_S)
    assert replica.num_calls == 2


async def test_releases_go_the_same_way_and_in_order(replica: Replica, client: Client) -> None:
    replica.may_answer.clear()
    call = asyncio.create_task(client.call("replica", [make_request("s")], timeout_s=PATIENCE_S))
    await asyncio.sleep(0)
    client.release("replica", ["s"])
    await wait_until(lambda: replica.released == ["s"])
    assert replica.num_calls == 1  # it was with the worker before the release
    replica.may_answer.set()
    await call
    client.release("another", ["t"])  # to which there is no stream: it holds nothing
    client.release("replica", ["u"])
    await wait_until(lambda: replica.released == ["s", "u"])


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
    assert replica.num_calls == 0


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
        assert replica.num_calls < num_calls
        answered = {(await read_answer(reader)).call_id for _ in range(num_calls)}
        assert answered == set(range(num_calls))


class TestCallsThatFailAlone:
    """A message that cannot be written or read ends its own call; the stream carries the others."""

    async def check_others(self, replica: Replica, client: Client) -> None:
        (stream,) = client._streams.values()
        assert stream.is_open
        before = replica.num_calls
        assert (await client.call("replica", [make_request()], timeout_s=PATIENCE_S)).results
        assert replica.num_calls == before + 1

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
        await wait_until(lambda: replica.num_calls == 1)
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
