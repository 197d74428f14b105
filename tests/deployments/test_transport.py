"""Streams between routers and workers, on real sockets."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from deployments.transport.messages import (
    VERIFY,
    Answer,
    Call,
    StreamAddress,
    frame,
    read_frame,
)
from deployments.transport.stream_client import StreamClient
from deployments.transport.stream_server import StreamServer
from workers.errors import ContextLengthError, WorkerLostError
from workers.types import Reply, SamplingParams, VerifyRequest, VerifyResult

Server = StreamServer[VerifyRequest, VerifyResult]
Client = StreamClient[VerifyRequest, VerifyResult]
PATIENCE_S = 10.0


def make_request(seq_id: str = "s", **changes: Any) -> VerifyRequest:
    request = VerifyRequest(seq_id=seq_id, base_len=0, new_tokens=(1, 2, 3), prompt_len=3)
    return dataclasses.replace(request, **changes)


class Replica:
    """A worker that answers when it is told to, reached by handle or stream."""

    def __init__(self) -> None:
        self.num_by_handle = 0
        self.num_by_stream = 0
        self.released: list[str] = []
        self.given_up: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.error: Exception | None = None
        self.server = Server(VERIFY, run=self._run_stream, release=self._release)
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

    async def release(self, replica_id: str, seq_ids: Sequence[str]) -> None:  # noqa: ARG002
        await self._release(seq_ids)

    async def stream_address(self, replica_id: str) -> StreamAddress:  # noqa: ARG002
        if self.address is None:
            raise WorkerLostError("it is gone")
        return self.address

    async def _run_stream(self, batch: Sequence[VerifyRequest]) -> Reply[VerifyResult]:
        self.num_by_stream += 1
        return await self._run(batch)

    async def _run(self, batch: Sequence[VerifyRequest]) -> Reply[VerifyResult]:
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.given_up += [request.seq_id for request in batch]
            raise
        if self.error is not None:
            raise self.error
        results = tuple(
            VerifyResult(seq_id=request.seq_id, tokens=request.new_tokens) for request in batch
        )
        return Reply(
            replica_id="replica", compute_s=0.25, num_steps=1, num_tokens=3, results=results
        )

    async def _release(self, seq_ids: Sequence[str]) -> None:
        self.released += seq_ids


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


def cut(client: Client) -> None:
    """As when the replica's process dies."""
    client._streams["replica"]._writer.transport.abort()


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
        reply=Reply(replica_id="r", compute_s=0.1, num_steps=1, num_tokens=3, results=(result,)),
    )
    assert VERIFY.decode_answer(VERIFY.encode_answer(answer)[4:]) == answer


async def test_after_the_first_call_a_stream_carries_them(replica: Replica, client: Client) -> None:
    reply = await client.call("replica", [make_request("a"), make_request("b")], timeout_s=1)
    assert [result.seq_id for result in reply.results] == ["a", "b"]
    assert (reply.replica_id, reply.compute_s) == ("replica", 0.25)
    assert (replica.num_by_handle, replica.num_by_stream) == (1, 1)
    await client.call(None, [make_request()], timeout_s=1)  # any replica: Serve chooses
    assert (replica.num_by_handle, replica.num_by_stream) == (2, 1)


async def test_calls_do_not_wait_for_each_other(replica: Replica, client: Client) -> None:
    replica.may_answer.clear()
    calls = [
        asyncio.create_task(client.call("replica", [make_request(str(i))], timeout_s=PATIENCE_S))
        for i in range(5)
    ]
    await until(lambda: replica.num_by_stream == 5)
    replica.may_answer.set()
    assert [(await call).results[0].seq_id for call in calls] == [str(i) for i in range(5)]


async def test_a_cancelled_call_is_given_up(replica: Replica, client: Client) -> None:
    replica.may_answer.clear()
    call = asyncio.create_task(client.call("replica", [make_request("s")], timeout_s=PATIENCE_S))
    await until(lambda: replica.num_by_stream == 1)
    call.cancel()
    await until(lambda: replica.given_up == ["s"])
    replica.may_answer.set()
    assert (await client.call("replica", [make_request("t")], timeout_s=1)).results


async def test_a_late_call_is_lost_and_given_up(replica: Replica, client: Client) -> None:
    replica.may_answer.clear()
    with pytest.raises(WorkerLostError, match=r"no answer in 0\.05 s"):
        await client.call("replica", [make_request("s")], timeout_s=0.05)
    await until(lambda: replica.given_up == ["s"])


async def test_an_error_of_the_worker_loses_the_call_alone(
    replica: Replica, client: Client
) -> None:
    replica.error = ContextLengthError("too long by 3")
    with pytest.raises(WorkerLostError, match="ContextLengthError: too long by 3"):
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
    await until(lambda: replica.given_up == ["s"])
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
    assert replica.address is not None
    reader, writer = await asyncio.open_connection(replica.address.host, replica.address.port)
    writer.write(sent)
    writer.write_eof()
    async with asyncio.timeout(PATIENCE_S):
        assert await read_frame(reader) is None
    writer.close()
    assert replica.released == []


async def test_what_is_no_message_ends_the_stream(replica: Replica) -> None:
    assert replica.address is not None
    reader, writer = await asyncio.open_connection(replica.address.host, replica.address.port)
    writer.write(frame(replica.address.token.encode()))
    writer.write(frame(b'{"kind": "run", "batch": [{"seq_id": 3}]}'))
    async with asyncio.timeout(PATIENCE_S):
        assert await read_frame(reader) is None
    writer.close()
    assert replica.num_by_stream == 0
