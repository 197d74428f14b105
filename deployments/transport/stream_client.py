"""The router's end of streams: one to each replica it knows, and handles for all else."""

import asyncio
import contextvars
import itertools
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from deployments.transport.messages import (
    Call,
    Codec,
    FrameProtocol,
    StreamAddress,
    call_id_of,
    frame,
)
from deployments.transport.worker_client import WorkerClient
from workers.errors import WorkerFailedError, WorkerLostError, WorkerTimeoutError
from workers.types import Reply, WorkRequest, WorkResult

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=WorkRequest)
ResultT = TypeVar("ResultT", bound=WorkResult)
AskedT = TypeVar("AskedT", bound=WorkRequest, contravariant=True)

CONNECT_TIMEOUT_S = 5.0
RECONNECT_AFTER_S = 10.0
# A machine that vanishes says nothing; these let the kernel find out within about 10 s.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}


class WorkerStream(FrameProtocol, Generic[RequestT, ResultT]):
    """A connection to one replica, for any number of calls at a time."""

    def __init__(self, codec: Codec[RequestT, ResultT]) -> None:
        super().__init__()
        self._codec = codec
        self._call_ids = itertools.count(1)  # 0 is the default, which is not sent
        self._waiting: dict[int, asyncio.Future[Reply[ResultT]]] = {}

    @classmethod
    async def open(
        cls, address: StreamAddress, codec: Codec[RequestT, ResultT]
    ) -> "WorkerStream[RequestT, ResultT]":
        """Raises OSError or TimeoutError."""
        events = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, stream = await events.create_connection(
                lambda: cls(codec), address.host, address.port
            )
        _keep_alive(stream.transport)
        stream.transport.write(frame(address.token.encode()))
        return stream

    @property
    def is_open(self) -> bool:
        return not self.transport.is_closing()

    async def call(self, batch: Sequence[RequestT], *, timeout_s: float) -> Reply[ResultT]:
        """Raises WorkerLostError, and WorkerFailedError if it may be by what the batch carries.

        A call that fails or is cancelled releases its sequences.
        """
        events = asyncio.get_running_loop()
        call_id = next(self._call_ids)
        try:
            self._send(Call(kind="run", call_id=call_id, batch=tuple(batch)))
        except ValueError as error:
            raise WorkerFailedError(f"a call cannot be written: {error}") from error
        answer: asyncio.Future[Reply[ResultT]] = events.create_future()
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
        """Heard before any later call; nothing confirms it, as a lost worker holds nothing."""
        self._send(Call(kind="release", seq_ids=tuple(seq_ids)))

    def close(self) -> None:
        self.transport.close()

    def _send(self, call: Call[RequestT]) -> None:
        self.transport.write(self._codec.encode_call(call))

    def frame_received(self, payload: bytes) -> None:
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


class AddressedClient(WorkerClient[AskedT, ResultT], Protocol[AskedT, ResultT]):
    """A WorkerClient that also knows where replicas listen."""

    async def stream_address(self, replica_id: str) -> StreamAddress:
        """Raises WorkerLostError."""
        ...


class StreamClient(Generic[RequestT, ResultT]):
    """A WorkerClient that prefers streams.

    The first call to a replica goes over `fallback`, which finds and balances; meanwhile a stream
    to whoever answered is opened, and calls to it go there. Where none can be opened, as behind a
    firewall, the fallback serves on.
    """

    def __init__(
        self,
        fallback: AddressedClient[RequestT, ResultT],
        codec: Codec[RequestT, ResultT],
        *,
        clock: Callable[[], float],
    ) -> None:
        self._fallback = fallback
        self._codec = codec
        self._clock = clock
        self._streams: dict[str, WorkerStream[RequestT, ResultT]] = {}
        self._opening: dict[str, asyncio.Task[None]] = {}
        self._not_before: dict[str, float] = {}

    async def call(
        self, replica_id: str | None, batch: Sequence[RequestT], *, timeout_s: float
    ) -> Reply[ResultT]:
        if replica_id is not None and (stream := self._open_stream(replica_id)) is not None:
            return await stream.call(batch, timeout_s=timeout_s)
        reply = await self._fallback.call(replica_id, batch, timeout_s=timeout_s)
        self._start_opening(reply.replica_id)
        return reply

    async def release(self, replica_id: str | None, seq_ids: Sequence[str]) -> None:
        stream = self._open_stream(replica_id) if replica_id is not None else None
        if stream is not None:
            stream.release(seq_ids)
        else:
            await self._fallback.release(replica_id, seq_ids)

    async def find(self) -> str:
        replica_id = await self._fallback.find()
        if self._open_stream(replica_id) is None:
            self._start_opening(replica_id)
            if (opening := self._opening.get(replica_id)) is not None:
                await asyncio.shield(opening)
        return replica_id

    def close(self) -> None:
        for task in self._opening.values():
            task.cancel()
        for stream in self._streams.values():
            stream.close()

    def _open_stream(self, replica_id: str) -> WorkerStream[RequestT, ResultT] | None:
        stream = self._streams.get(replica_id)
        if stream is not None and not stream.is_open:
            del self._streams[replica_id]
            return None
        return stream

    def _start_opening(self, replica_id: str) -> None:
        is_pending = replica_id in self._streams or replica_id in self._opening
        if is_pending or self._clock() < self._not_before.get(replica_id, 0.0):
            return
        self._forget_the_lost()
        # not in the request's context, which Serve cancels with the request
        self._opening[replica_id] = asyncio.create_task(
            self._open(replica_id), context=contextvars.Context()
        )

    def _forget_the_lost(self) -> None:
        """Replicas come and go; what is known of those that have gone must not pile up."""
        now = self._clock()
        self._streams = {name: s for name, s in self._streams.items() if s.is_open}
        self._not_before = {name: t for name, t in self._not_before.items() if t > now}

    async def _open(self, replica_id: str) -> None:
        try:
            address = await self._fallback.stream_address(replica_id)
            if address.replica_id == replica_id:
                self._streams[replica_id] = await WorkerStream.open(address, self._codec)
        except (WorkerLostError, OSError, TimeoutError) as error:
            logger.warning(
                "no stream to %s, so its calls go over Serve handles: %s", replica_id, error
            )
            self._not_before[replica_id] = self._clock() + RECONNECT_AFTER_S
        finally:
            del self._opening[replica_id]


def _keep_alive(transport: asyncio.Transport) -> None:
    connection = transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # the names differ between systems
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
