"""Streams between routers and workers, on real sockets."""

import asyncio
import socket
from typing import Any

import pytest

from deployments.transport import stream_server
from deployments.transport.messages import MAX_MESSAGE_BYTES, VERIFY, Answer, Call, frame
from tests.deployments.loops import wait_until
from tests.deployments.transport.streams import (
    PATIENCE_S,
    Client,
    Replica,
    cut,
    has_ended,
    make_reply,
    make_request,
    raw_stream,
    read_answer,
    token_frame,
)
from workers.errors import ContextLengthError, WorkerFailedError, WorkerLostError
from workers.sampling_params import SamplingParams
from workers.types import Reply, VerifyRequest, VerifyResult


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
