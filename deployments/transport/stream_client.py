"""The router's end of streams: one to each replica it knows, and handles for all else."""

import asyncio
import contextvars
import itertools
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from deployments.transport.messages import Answer, Call, Codec, StreamAddress, frame, read_frame
from deployments.transport.worker_client import WorkerClient
from workers.errors import WorkerLostError
from workers.types import Reply, WorkRequest, WorkResult

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=WorkRequest)
ResultT = TypeVar("ResultT", bound=WorkResult)
AskedT = TypeVar("AskedT", bound=WorkRequest, contravariant=True)

CONNECT_TIMEOUT_S = 5.0
RECONNECT_AFTER_S = 10.0
# A machine that vanishes says nothing; these let the kernel find out within about 10 s.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}


class WorkerStream(Generic[RequestT, ResultT]):
    """A connection to one replica, for any number of calls at a time."""

    def __init__(
        self,
        codec: Codec[RequestT, ResultT],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._codec = codec
        self._writer = writer
        self._call_ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Reply[ResultT]]] = {}
        self._reading = asyncio.create_task(self._read(reader), context=contextvars.Context())

    @classmethod
    async def open(
        cls, address: StreamAddress, codec: Codec[RequestT, ResultT]
    ) -> "WorkerStream[RequestT, ResultT]":
        """Raises OSError or TimeoutError."""
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(address.host, address.port)
        _keep_alive(writer)
        writer.write(frame(address.token.encode()))
        return cls(codec, reader, writer)

    @property
    def is_open(self) -> bool:
        return not self._reading.done()

    async def call(self, batch: Sequence[RequestT], *, timeout_s: float) -> Reply[ResultT]:
        """Raises WorkerLostError."""
        call_id = next(self._call_ids)
        answer: asyncio.Future[Reply[ResultT]] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = answer
        self._send(Call(kind="run", call_id=call_id, batch=tuple(batch)))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise WorkerLostError(f"a worker brought no answer in {timeout_s:g} s") from None
        finally:
            if self._waiting.pop(call_id, None) is not None and self.is_open:
                self._send(Call(kind="give_up", call_id=call_id))

    def release(self, seq_ids: Sequence[str]) -> None:
        """Heard before any later call; nothing confirms it, as a lost worker holds nothing."""
        self._send(Call(kind="release", seq_ids=tuple(seq_ids)))

    def close(self) -> None:
        self._reading.cancel()
        self._writer.close()

    def _send(self, call: Call[RequestT]) -> None:
        self._writer.write(self._codec.encode_call(call))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        reason = "the connection ended"
        try:
            while (payload := await read_frame(reader)) is not None:
                self._resolve(self._codec.decode_answer(payload))
        except ValueError as error:
            reason = str(error)
        finally:
            self._writer.close()
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(WorkerLostError(f"a worker is lost: {reason}"))
            self._waiting.clear()

    def _resolve(self, answer: Answer[ResultT]) -> None:
        waiting = self._waiting.pop(answer.call_id, None)
        if waiting is None or waiting.done():
            return
        if answer.reply is not None:
            waiting.set_result(answer.reply)
        else:
            waiting.set_exception(WorkerLostError(f"a worker failed: {answer.error}"))


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

    async def release(self, replica_id: str, seq_ids: Sequence[str]) -> None:
        if (stream := self._open_stream(replica_id)) is not None:
            stream.release(seq_ids)
        else:
            await self._fallback.release(replica_id, seq_ids)

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
        # not in the request's context, which Serve cancels with the request
        self._opening[replica_id] = asyncio.create_task(
            self._open(replica_id), context=contextvars.Context()
        )

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


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # the names differ between systems
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
