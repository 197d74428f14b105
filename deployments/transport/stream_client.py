"""The router's end of a stream to one replica."""

import asyncio
import itertools
import socket
import ssl
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from deployments.transport.messages import (
    Call,
    Codec,
    FrameProtocol,
    StreamAddress,
    call_id_of,
    frame,
)
from deployments.transport.tls import stream_tls
from workers.errors import WorkerFailedError, WorkerLostError, WorkerTimeoutError
from workers.types import Reply, WorkRequest, WorkResult

RequestT = TypeVar("RequestT", bound=WorkRequest)
ResultT = TypeVar("ResultT", bound=WorkResult)

CONNECT_TIMEOUT_S = 5.0
# A machine that vanishes says nothing; these let the kernel find out within about 10 s.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}


class WorkerStream(FrameProtocol, Generic[RequestT, ResultT]):
    """A connection to one replica, for any number of calls at a time."""

    def __init__(self, codec: Codec[RequestT, ResultT]) -> None:
        super().__init__()
        self._codec = codec
        self._call_ids = itertools.count(1)  # 0 is the default, which is not sent
        self._waiting: dict[int, asyncio.Future[Reply[ResultT]]] = {}
        self._heard_at = 0.0
        """The time of the last answer, or of the first call since none waited, on the event loop's
        clock."""
        self.steps_version = 0
        """The table of step times that the replica has, as its caller knows; see Reply."""

    @classmethod
    async def open(
        cls, address: StreamAddress, codec: Codec[RequestT, ResultT]
    ) -> "WorkerStream[RequestT, ResultT]":
        """Open a stream to a replica; raises OSError or TimeoutError."""
        events = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, stream = await events.create_connection(
                lambda: cls(codec),
                address.host,
                address.port,
                ssl=stream_tls(ssl.Purpose.SERVER_AUTH),
            )
        _keep_alive(stream.transport)
        stream.transport.write(frame(address.token.encode()))
        return stream

    @property
    def is_open(self) -> bool:
        return not self.transport.is_closing()

    @property
    def silent_s(self) -> float:
        """How long calls have been waiting for any answer; 0 if none waits."""
        now = asyncio.get_running_loop().time()
        return now - self._heard_at if self._waiting else 0.0

    async def call(self, batch: Sequence[RequestT], *, timeout_s: float) -> Reply[ResultT]:
        """Serve a batch; raises WorkerLostError, and WorkerFailedError if what the batch carries
        may be the cause.

        A call that fails or is cancelled releases its sequences.
        """
        events = asyncio.get_running_loop()
        call_id = next(self._call_ids)
        try:
            self._send(Call(kind="run", call_id=call_id, batch=tuple(batch)))
        except ValueError as error:
            raise WorkerFailedError(f"a call cannot be written: {error}") from error
        answer: asyncio.Future[Reply[ResultT]] = events.create_future()
        self._heard_at = self._heard_at if self._waiting else events.time()
        self._waiting[call_id] = answer
        deadline = events.call_later(
            timeout_s,
            _lose,
            answer,
            WorkerTimeoutError(f"a worker brought no answer in {timeout_s:g} s"),
        )
        try:
            return await answer
        except (asyncio.CancelledError, WorkerLostError):
            # also if the answer has just come: it is lost on the caller
            if self.is_open:
                self.release([request.seq_id for request in batch])
            raise
        finally:
            deadline.cancel()
            self._waiting.pop(call_id, None)

    def release(self, seq_ids: Sequence[str]) -> None:
        """Have the replica forget sequences before any later call; nothing confirms it, as a lost
        worker holds nothing."""
        self._send(Call(kind="release", seq_ids=tuple(seq_ids)))

    def close(self) -> None:
        self.transport.close()

    def _send(self, call: Call[RequestT]) -> None:
        self.transport.write(self._codec.encode_call(call))

    def frame_received(self, payload: bytes) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        try:
            answer = self._codec.decode_answer(payload)
        except ValueError as error:
            call_id = call_id_of(payload)
            if call_id is None:
                raise
            self._fail(call_id, f"an answer cannot be read: {error}")
            return
        if answer.reply is None:
            kind = WorkerLostError if answer.is_lost else WorkerFailedError
            self._fail(answer.call_id, answer.error, kind)
        elif (waiting := self._waiting.pop(answer.call_id, None)) and not waiting.done():
            waiting.set_result(answer.reply)

    def _fail(
        self, call_id: int, reason: str, kind: type[WorkerLostError] = WorkerFailedError
    ) -> None:
        """End one call; the stream and its other calls go on."""
        waiting = self._waiting.pop(call_id, None)
        if waiting is not None and not waiting.done():
            waiting.set_exception(kind(f"a worker failed: {reason}"))

    def connection_lost(self, error: Exception | None) -> None:
        reason = self._error or error or "the connection ended"
        for waiting in self._waiting.values():
            _lose(waiting, WorkerLostError(f"a worker is lost: {reason}"))
        self._waiting.clear()


def _lose(waiting: asyncio.Future[Any], error: WorkerLostError) -> None:
    if not waiting.done():
        waiting.set_exception(error)


def _keep_alive(transport: asyncio.Transport) -> None:
    connection = transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # the names differ between systems
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
