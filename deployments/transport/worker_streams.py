"""All replicas of one kind of worker, with a stream to each."""

import asyncio
import contextvars
import logging
import random
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from deployments.transport.directory import Directory
from deployments.transport.loads import ReplicaLoads
from deployments.transport.messages import Codec, StreamAddress
from deployments.transport.stream_client import WorkerStream
from workers.errors import WorkerLostError, WorkerTimeoutError
from workers.types import Reply, WorkRequest, WorkResult

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=WorkRequest)
ResultT = TypeVar("ResultT", bound=WorkResult)

REFRESH_S = 1.0
"""How often it is asked who serves, once somebody does."""
SEARCH_S = 0.1
"""How often while nobody does."""
FIND_TIMEOUT_S = 10.0
"""How long a call waits for a replica that can be reached, before its caller tries again."""

SILENT_S = 5.0
"""A replica that has answered nothing for so long gets no new sequences: it may hang."""


class WorkerStreams(Generic[RequestT, ResultT]):
    """A WorkerClient. Replicas come and go; it finds out about both by itself."""

    def __init__(
        self,
        directory: Directory,
        codec: Codec[RequestT, ResultT],
        *,
        on_new_steps: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to look for replicas; has to be made on an event loop.

        `on_new_steps` is called when a replica has measured its steps anew, as its answers say.
        """
        self._directory = directory
        self._codec = codec
        self._on_new_steps = on_new_steps
        self._streams: dict[str, WorkerStream[RequestT, ResultT]] = {}
        self._reported: dict[str, float] = {}
        """Tokens cached, by replica, of those that serve; a stream may outlast its entry here."""
        self._loads = ReplicaLoads()
        self._rng = random.Random()
        self._unreachable: set[str] = set()
        self._last_failure = "none has been found yet"
        self._has_opened = asyncio.Event()
        # in a context of its own: under a request's, Serve would cancel its calls with the request
        self._watching = asyncio.create_task(self._watch(), context=contextvars.Context())

    async def call(
        self, replica_id: str | None, batch: Sequence[RequestT], *, timeout_s: float
    ) -> Reply[ResultT]:
        stream = self._stream_to(replica_id)
        if stream is None:
            # a new sequence waits; of one that has lost its replica the caller should learn now
            await self._wait_for_any(min(timeout_s, FIND_TIMEOUT_S) if replica_id is None else 0.0)
            stream = self._choose(sum(len(request.new_tokens) for request in batch))
        reply = await stream.call(batch, timeout_s=timeout_s)
        if reply.steps_version != stream.steps_version:
            stream.steps_version = reply.steps_version
            self._on_new_steps()
        return reply

    def release(self, replica_id: str, seq_ids: Sequence[str]) -> None:
        if (stream := self._stream_to(replica_id)) is not None:
            stream.release(seq_ids)  # of one that has ended all are released

    async def find(self) -> str:
        await self._wait_for_any(FIND_TIMEOUT_S)
        calls = [asyncio.create_task(_answers(stream)) for stream in self._open_streams().values()]
        try:
            for answered in asyncio.as_completed(calls):
                if (replica_id := await answered) is not None:
                    return replica_id
        finally:
            for call in calls:
                call.cancel()
        raise WorkerTimeoutError(f"none of {len(calls)} replicas answers")

    def close(self) -> None:
        self._watching.cancel()
        for stream in self._streams.values():
            stream.close()

    def _stream_to(self, replica_id: str | None) -> WorkerStream[RequestT, ResultT] | None:
        stream = self._streams.get(replica_id) if replica_id is not None else None
        return stream if stream is not None and stream.is_open else None

    def _open_streams(self) -> dict[str, WorkerStream[RequestT, ResultT]]:
        return {name: stream for name, stream in self._streams.items() if stream.is_open}

    async def _wait_for_any(self, timeout_s: float) -> None:
        """Wait until there is a stream; raises WorkerTimeoutError if there is none in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._open_streams():
                    self._has_opened.clear()
                    await self._has_opened.wait()
        except TimeoutError:
            raise WorkerTimeoutError(
                f"no worker was reached in {timeout_s:g} s: {self._last_failure}"
            ) from None

    def _choose(self, num_tokens: int) -> WorkerStream[RequestT, ResultT]:
        """The stream of the replica that caches least, of those that serve and are not silent."""
        streams = self._open_streams()
        streams = {n: s for n, s in streams.items() if s.silent_s < SILENT_S} or streams
        loads = {name: load for name, load in self._reported.items() if name in streams}
        loads = loads or dict.fromkeys(streams, 0.0)
        return streams[self._loads.choose(loads, num_tokens, rng=self._rng)]

    async def _watch(self) -> None:
        while True:
            try:
                await self._refresh()
            except Exception as error:  # it is asked again
                if not isinstance(error, WorkerLostError):
                    logger.exception("replicas were not looked for")
                self._last_failure = str(error)
            await asyncio.sleep(REFRESH_S if self._open_streams() else SEARCH_S)

    async def _refresh(self) -> None:
        """Learn who serves, and open streams to those that are new; raises WorkerLostError."""
        reports = await self._directory.replicas()
        self._reported = {r.address.replica_id: r.num_cached_tokens for r in reports}
        self._unreachable &= set(self._reported)
        self._streams = self._open_streams()
        missing = [r.address for r in reports if r.address.replica_id not in self._streams]
        await asyncio.gather(*map(self._open, missing))

    async def _open(self, address: StreamAddress) -> None:
        try:
            stream = await WorkerStream.open(address, self._codec)
        except (OSError, TimeoutError) as error:
            self._last_failure = (
                f"{address.replica_id} cannot be reached at {address.host}:{address.port} "
                f"({error or 'it does not answer'}); nodes must reach each other's ports"
            )
            if address.replica_id not in self._unreachable:  # said once
                logger.warning("%s", self._last_failure)
            self._unreachable.add(address.replica_id)
        else:
            self._unreachable.discard(address.replica_id)
            self._streams[address.replica_id] = stream
            self._last_failure = "the last connection has ended"
            self._has_opened.set()


async def _answers(stream: WorkerStream[RequestT, ResultT]) -> str | None:
    """The id of a stream's replica, once it has answered; None if it does not."""
    try:
        return (await stream.call([], timeout_s=FIND_TIMEOUT_S)).replica_id
    except WorkerLostError:
        return None
