"""Calls that fail alone: a message that cannot be written or read ends no stream."""

import asyncio
import dataclasses
import math
from typing import Any

import pytest

from deployments.transport.messages import VERIFY, Answer, frame
from tests.deployments.loops import wait_until
from tests.deployments.transport.streams import (
    PATIENCE_S,
    Client,
    Replica,
    make_reply,
    make_request,
)
from workers.errors import WorkerFailedError


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
