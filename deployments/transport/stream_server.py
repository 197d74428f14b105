"""The worker's end of streams: a port that serves whoever knows its token."""

import asyncio
import logging
import secrets
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from deployments.transport.messages import (
    MAX_MESSAGE_BYTES,
    Answer,
    Codec,
    FrameProtocol,
    StreamAddress,
    call_id_of,
)
from deployments.transport.tls import stream_tls
from workers.errors import WorkerFailedError, WorkerLostError
from workers.types import Reply, WorkRequest, WorkResult

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=WorkRequest)
ResultT = TypeVar("ResultT", bound=WorkResult)

TOKEN_BYTES = 32
MAX_TOKEN_FRAME = 2 * TOKEN_BYTES
TOKEN_TIMEOUT_S = 5.0


class StreamServer(Generic[RequestT, ResultT]):
    """Serves the calls of any number of streams.

    A stream that ends takes its sequences with it: whoever asked is gone, or will send them again.
    """

    def __init__(
        self,
        codec: Codec[RequestT, ResultT],
        *,
        run: Callable[[Sequence[RequestT], Callable[[Reply[ResultT] | Exception], None]], None],
        release: Callable[[Sequence[str]], None],
    ) -> None:
        """Both are called as messages arrive, in their order; `run` is told whom to answer."""
        self.codec = codec
        self.run = run
        self.release = release
        self.token = secrets.token_hex(TOKEN_BYTES)
        self.streams: set[_Stream[RequestT, ResultT]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, replica_id: str) -> StreamAddress:
        """Listen on a free port of one interface."""
        events = asyncio.get_running_loop()
        tls = stream_tls(ssl.Purpose.CLIENT_AUTH)
        self._server = await events.create_server(lambda: _Stream(self), host, 0, ssl=tls)
        port = self._server.sockets[0].getsockname()[1]
        return StreamAddress(replica_id=replica_id, host=host, port=port, token=self.token)

    def close(self) -> None:
        """End all streams and take no more."""
        if self._server is not None:
            self._server.close()
        for stream in self.streams:
            stream.transport.abort()


class _Stream(FrameProtocol, Generic[RequestT, ResultT]):
    """One router's stream."""

    def __init__(self, server: StreamServer[RequestT, ResultT]) -> None:
        super().__init__(max_bytes=MAX_TOKEN_FRAME)
        self._server = server
        self._is_authentic = False
        self._held: set[str] = set()
        """Sequences run and not released."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.streams.add(self)
        events = asyncio.get_running_loop()
        self._token_timer = events.call_later(TOKEN_TIMEOUT_S, transport.close)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self._server.streams.discard(self)
        if self._error is not None:
            logger.warning("a stream is closed, for it sent no message of ours: %s", self._error)
        self._token_timer.cancel()
        self._server.release(tuple(self._held))

    # a peer that reads no answers is not asked for more calls

    def pause_writing(self) -> None:
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self.transport.resume_reading()

    def frame_received(self, payload: bytes) -> None:
        """Take the token, then calls; one that cannot be read is refused, if it is one at all."""
        if not self._is_authentic:
            self._authenticate(payload)
            return
        try:
            call = self._server.codec.decode_call(payload)
        except ValueError as error:
            call_id = call_id_of(payload)
            if call_id is None:
                raise
            self._answer(call_id, error)
            return
        match call.kind:
            case "release":
                self._held.difference_update(call.seq_ids)
                self._server.release(call.seq_ids)
            case "run":
                self._held.update(request.seq_id for request in call.batch)
                self._server.run(call.batch, partial(self._answer, call.call_id))

    def _authenticate(self, payload: bytes) -> None:
        """Raise ValueError unless these are the bytes of our token."""
        if not secrets.compare_digest(payload, self._server.token.encode()):
            raise ValueError("the token is wrong")
        self._is_authentic = True
        self._token_timer.cancel()
        self._max_bytes = MAX_MESSAGE_BYTES

    def _answer(self, call_id: int, outcome: Reply[ResultT] | Exception) -> None:
        if self.transport.is_closing():
            return
        try:
            message = self._encode(call_id, outcome)
        except ValueError as error:
            message = self._encode(call_id, error)
        self.transport.write(message)

    def _encode(self, call_id: int, outcome: Reply[ResultT] | Exception) -> bytes:
        """What came of a call as bytes; raises ValueError if it is too long to be read."""
        if not isinstance(outcome, Exception):
            return self._server.codec.encode_answer(Answer(call_id=call_id, reply=outcome))
        # the router's loop decides what becomes of it
        logger.warning("a call failed: %s", outcome)
        is_lost = isinstance(outcome, WorkerLostError) and not isinstance(
            outcome, WorkerFailedError
        )
        reason = f"{type(outcome).__name__}: {outcome}"
        answer: Answer[ResultT] = Answer(call_id=call_id, error=reason, is_lost=is_lost)
        return self._server.codec.encode_answer(answer)
