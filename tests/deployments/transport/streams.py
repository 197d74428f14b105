"""Replicas that answer when they are told to, and streams to them."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from deployments.transport.messages import VERIFY, Answer, ReplicaReport, StreamAddress, frame
from deployments.transport.stream_server import StreamServer
from deployments.transport.worker_streams import WorkerStreams
from workers.errors import ContextLengthError, WorkerLostError
from workers.types import Reply, VerifyRequest, VerifyResult

Server = StreamServer[VerifyRequest, VerifyResult]
Client = WorkerStreams[VerifyRequest, VerifyResult]
PATIENCE_S = 10.0


def make_request(seq_id: str = "s", **changes: Any) -> VerifyRequest:
    request = VerifyRequest(seq_id=seq_id, base_len=0, new_tokens=(1, 2, 3), prompt_len=3)
    return dataclasses.replace(request, **changes)


def make_reply(batch: Sequence[VerifyRequest]) -> Reply[VerifyResult]:
    results = tuple(
        VerifyResult(seq_id=request.seq_id, tokens=request.new_tokens) for request in batch
    )
    return Reply(
        replica_id="replica",
        compute_s=0.25,
        num_steps=1,
        num_tokens=3,
        num_prefill_tokens=0,
        results=results,
    )


class Replica:
    """A worker that answers when it is told to."""

    def __init__(self, name: str = "replica") -> None:
        self.name = name
        self.num_cached_tokens = 0
        self.steps_version = 0
        self.num_calls = 0
        self.released: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.error: Exception | None = None
        self._runs: list[asyncio.Task[None]] = []
        self.server = Server(VERIFY, run=self._start_run, release=self.released.extend)
        self.address: StreamAddress | None = None

    async def listen(self) -> None:
        self.address = await self.server.start("127.0.0.1", self.name)

    @property
    def report(self) -> ReplicaReport:
        assert self.address is not None
        return ReplicaReport(address=self.address, num_cached_tokens=self.num_cached_tokens)

    def _start_run(self, batch: Sequence[VerifyRequest], answer: Callable[[Any], None]) -> None:
        self.num_calls += 1

        async def run() -> None:
            try:
                answer(await self._run(batch))
            except ContextLengthError as error:
                answer(error)

        self._runs.append(asyncio.create_task(run()))

    async def _run(self, batch: Sequence[VerifyRequest]) -> Reply[VerifyResult]:
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return dataclasses.replace(
            make_reply(batch), replica_id=self.name, steps_version=self.steps_version
        )


class Cluster:
    """A directory of replicas that come and go."""

    def __init__(self, *replicas: Replica) -> None:
        self.listed = list(replicas)
        self.num_asked = 0
        self.num_new_steps = 0

    def note_new_steps(self) -> None:
        self.num_new_steps += 1

    async def replicas(self) -> list[ReplicaReport]:
        self.num_asked += 1
        if not self.listed:
            raise WorkerLostError("nobody is there")
        return [replica.report for replica in self.listed]


@asynccontextmanager
async def raw_stream(
    replica: Replica,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    assert replica.address is not None
    reader, writer = await asyncio.open_connection(replica.address.host, replica.address.port)
    async with asyncio.timeout(PATIENCE_S):
        yield reader, writer
    writer.close()


def token_frame(replica: Replica) -> bytes:
    assert replica.address is not None
    return frame(replica.address.token.encode())


async def read_answer(reader: asyncio.StreamReader) -> Answer[VerifyResult]:
    num_bytes = int.from_bytes(await reader.readexactly(4))
    return VERIFY.decode_answer(await reader.readexactly(num_bytes))


async def has_ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


def cut(client: Client) -> None:
    """As when the replica's process dies."""
    client._streams["replica"].transport.abort()
