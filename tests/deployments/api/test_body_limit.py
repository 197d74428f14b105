"""Bodies that never end: they take neither a place for ever nor the memory of others."""

import asyncio
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from deployments.api.body_limit import MAX_UNFINISHED, BodyLimit

MAX_BYTES = 1000
SCOPE = {"type": "http", "method": "POST", "headers": []}


async def count_bytes(scope: Scope, receive: Receive, send: Send) -> None:
    body = await Request(scope, receive).body()
    await Response(str(len(body)))(scope, receive, send)


class Client:
    """Sends parts of a body, and hears the answer."""

    def __init__(self, limit: BodyLimit) -> None:
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._sent: list[Message] = []
        self._call = asyncio.create_task(limit(SCOPE, self._inbox.get, self._note))

    async def _note(self, message: Any) -> None:
        self._sent.append(message)

    async def send(self, body: bytes, *, has_more: bool) -> None:
        self._inbox.put_nowait({"type": "http.request", "body": body, "more_body": has_more})
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    @property
    def is_waiting(self) -> bool:
        return not self._call.done()

    async def answer(self) -> tuple[int, bytes]:
        await self._call
        return self._sent[0]["status"], self._sent[1]["body"]


async def test_a_body_that_does_not_end_in_time_is_408() -> None:
    client = Client(BodyLimit(count_bytes, max_bytes=MAX_BYTES, read_timeout_s=0.05))
    await client.send(b"{", has_more=True)
    status, body = await client.answer()
    assert status == 408
    assert "did not arrive within 0.05 s" in json.loads(body)["error"]["message"]


async def test_unfinished_bodies_together_are_bounded() -> None:
    limit = BodyLimit(count_bytes, max_bytes=MAX_BYTES)
    clients = [Client(limit) for _ in range(MAX_UNFINISHED + 1)]
    for client in clients:
        await client.send(b"a" * MAX_BYTES, has_more=True)
    assert [client.is_waiting for client in clients] == [True] * MAX_UNFINISHED + [False]
    status, body = await clients.pop().answer()
    assert status == 429
    assert "long requests" in json.loads(body)["error"]["message"]
    whole = Client(limit)  # one that holds nobody up is served meanwhile
    await whole.send(b"a" * MAX_BYTES, has_more=False)
    assert await whole.answer() == (200, b"1000")
    for client in clients:
        await client.send(b"", has_more=False)
        assert await client.answer() == (200, b"1000")
    late = [Client(limit) for _ in range(MAX_UNFINISHED)]  # there is room again
    for client in late:
        await client.send(b"a" * MAX_BYTES, has_more=True)
    assert all(client.is_waiting for client in late)
    for client in late:
        await client.send(b"", has_more=False)
        await client.answer()
