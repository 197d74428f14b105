"""The worker's end of streams: a port that serves whoever knows its token."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from deployments.transport.messages import Answer, Call, Codec, StreamAddress, read_frame
from workers.types import Reply, WorkRequest, WorkResult

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=WorkRequest)
ResultT = TypeVar("ResultT", bound=WorkResult)

TOKEN_BYTES = 32
MAX_TOKEN_FRAME = 2 * TOKEN_BYTES
TOKEN_TIMEOUT_S = 5.0


class StreamServer(Generic[RequestT, ResultT]):
    """Serves the calls of any number of streams.

    A stream that ends takes its unanswered calls with it: whoever asked is gone.
    """

    def __init__(
        self,
        codec: Codec[RequestT, ResultT],
        *,
        run: Callable[[Sequence[RequestT]], Awaitable[Reply[ResultT]]],
        release: Callable[[Sequence[str]], Awaitable[None]],
    ) -> None:
        self._codec = codec
        self._run = run
        self._release = release
        self._token = secrets.token_hex(TOKEN_BYTES)
        self._server: asyncio.Server | None = None

    async def start(self, host: str, replica_id: str) -> StreamAddress:
        """Listen on a free port of one interface."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        port = self._server.sockets[0].getsockname()[1]
        return StreamAddress(replica_id=replica_id, host=host, port=port, token=self._token)

    def close(self) -> None:
        """Take no more streams; those that are open go on."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls: dict[int, asyncio.Task[None]] = {}
        try:
            if await self._is_authentic(reader):
                while (payload := await read_frame(reader)) is not None:
                    await self._take(self._codec.decode_call(payload), calls, writer)
        except ValueError as error:
            logger.warning("a stream is closed, for it sent no message of ours: %s", error)
        finally:
            for task in calls.values():
                task.cancel()
            writer.close()

    async def _is_authentic(self, reader: asyncio.StreamReader) -> bool:
        try:
            async with asyncio.timeout(TOKEN_TIMEOUT_S):
                token = await read_frame(reader, max_bytes=MAX_TOKEN_FRAME)
        except TimeoutError:
            return False
        return token is not None and secrets.compare_digest(token, self._token.encode())

    async def _take(
        self,
        call: Call[RequestT],
        calls: dict[int, asyncio.Task[None]],
        writer: asyncio.StreamWriter,
    ) -> None:
        match call.kind:
            case "release":
                await self._release(call.seq_ids)
            case "give_up":
                if (given_up := calls.get(call.call_id)) is not None:
                    given_up.cancel()
            case "run":
                task = asyncio.create_task(self._answer(call, writer))
                calls[call.call_id] = task
                task.add_done_callback(lambda _: calls.pop(call.call_id, None))
                await asyncio.sleep(0)  # it is with the worker before the next message is read

    async def _answer(self, call: Call[RequestT], writer: asyncio.StreamWriter) -> None:
        try:
            answer = Answer(call_id=call.call_id, reply=await self._run(call.batch))
        except Exception as error:  # the router's loop decides what becomes of the sequences
            logger.warning("a call failed: %s", error)
            answer = Answer(call_id=call.call_id, error=f"{type(error).__name__}: {error}")
        writer.write(self._codec.encode_answer(answer))
