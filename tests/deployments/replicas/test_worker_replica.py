"""A replica without Serve: a worker on its own thread, reached by streams."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from deployments.args import AppArgs
from deployments.replicas.worker_replica import WorkerReplica
from deployments.transport.messages import VERIFY
from deployments.transport.stream_client import WorkerStream
from tests.deployments.loops import wait_until
from tests.fakes import answer_of
from workers.errors import WorkerFailedError, WorkerLostError
from workers.types import Reply, VerifyRequest, VerifyResult

PATIENCE_S = 10.0


def make_request(seq_id: str, *, num_steps: int = 1) -> VerifyRequest:
    return VerifyRequest(seq_id=seq_id, base_len=0, new_tokens=(1,) * num_steps, prompt_len=1)


class Worker:
    """A StepWorker that runs one token of each request in a step, when it may."""

    num_tokens_run = num_sequences = num_used_blocks = num_waiting = 0
    num_prompt_tokens = num_prefix_tokens = num_prefill_tokens = num_preemptions = 0
    has_only_prompts = is_in_group = False
    warnings = ()
    info = SimpleNamespace(block_size=16)

    def __init__(self) -> None:
        self.times_measured: list[int] = []
        """How many steps there had been when its step times were measured."""
        self.step_table = SimpleNamespace(
            is_outdated=False,
            version=0,
            measure=lambda: self.times_measured.append(len(self.steps)),
        )
        self.steps: list[list[str]] = []
        """What was in each, from when it began."""
        self.released: list[str] = []
        self.error: Exception | None = None
        self._left: dict[str, int] = {}
        self._may_end = threading.Semaphore(0)

    def let(self, num_steps: int) -> None:
        """Let steps end that have begun or will."""
        self._may_end.release(num_steps)

    def on_grammar_ready(self, call: Callable[[], None]) -> None:
        """It has no grammars."""

    def start_loading_grammars(self) -> None:
        """It has no grammars."""

    def unanswered(self, seq_id: str, **why: Any) -> VerifyResult:
        return VerifyResult(seq_id=seq_id, **why)

    def report_progress(self, seq_ids: Iterable[str]) -> list[VerifyResult]:  # noqa: ARG002
        return []

    def release(self, seq_ids: Iterable[str]) -> None:
        for seq_id in seq_ids:
            self.released.append(seq_id)
            self._left.pop(seq_id, None)

    def submit(self, request: VerifyRequest) -> list[VerifyResult]:
        self._left[request.seq_id] = len(request.new_tokens)
        return []

    def park_threads(self) -> None:
        pass

    def step(self) -> tuple[list[VerifyResult], bool]:
        if not self._left:
            return [], False
        self.steps.append(sorted(self._left))
        assert self._may_end.acquire(timeout=PATIENCE_S)
        if self.error is not None:
            raise self.error
        self._left = {seq_id: left - 1 for seq_id, left in self._left.items()}
        done = [seq_id for seq_id, left in self._left.items() if left == 0]
        for seq_id in done:
            del self._left[seq_id]
        return [VerifyResult(seq_id=seq_id, tokens=(7,)) for seq_id in done], True


class Replica(WorkerReplica[VerifyRequest, VerifyResult]):
    worker: Any
    ended_by: str | None = None
    """Why its process would have ended."""

    @classmethod
    async def start(cls) -> "Replica":
        replica = cls()
        replica.worker = Worker()
        await replica._start(
            AppArgs(compile="off"),
            lambda: replica.worker,
            VERIFY,
            role="target",
        )
        return replica

    def _end(self, reason: str) -> None:
        self.ended_by = reason

    async def verify(self, batch: Sequence[VerifyRequest]) -> Reply[VerifyResult]:
        """A call on the worker's own thread, as one that a stream has brought."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._thread.run(answer_of(self._loop, batch))

    async def open_stream(self) -> WorkerStream[VerifyRequest, VerifyResult]:
        """One that has been heard: opening it takes the worker several turns of its event loop."""
        stream = await WorkerStream.open((await self.report()).address, VERIFY)
        self.worker.let(1)
        await stream.call([make_request("hello")], timeout_s=PATIENCE_S)
        for _ in range(3):  # calls that come as soon as the answer would count its step as theirs
            await self._thread.run(asyncio.sleep(0))
        self.worker.steps.clear()
        return stream

    async def close(self) -> None:
        self.worker.let(1000)
        self._thread.call_soon(self._server.close)
        await self._thread.run(self._loop.close())
        self._thread.stop()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
async def replica(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Replica]:
    """On the event loop of the standard library, and on the one that Ray installs."""
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="replica"))
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr("asyncio.new_event_loop", request.param)
    replica = await Replica.start()
    yield replica
    await replica.close()


Verify = Callable[[VerifyRequest], Awaitable[Reply[VerifyResult]]]


@pytest.fixture
async def verify(replica: Replica) -> AsyncIterator[Verify]:
    """A caller beside `Replica.verify`."""
    stream = await replica.open_stream()
    yield lambda one: stream.call([one], timeout_s=PATIENCE_S)
    stream.close()


async def start(
    awaitable: Awaitable[Reply[VerifyResult]],
) -> asyncio.Future[Reply[VerifyResult]]:
    """Let a call leave."""
    call = asyncio.ensure_future(awaitable)
    await asyncio.sleep(0)
    return call


async def test_what_comes_during_a_step_is_in_the_next_and_is_answered_before_another(
    replica: Replica, verify: Verify
) -> None:
    worker = replica.worker
    long = await start(replica.verify([make_request("long", num_steps=3)]))
    await wait_until(lambda: worker.steps == [["long"]])
    short = await start(verify(make_request("short")))
    worker.let(1)
    await wait_until(lambda: len(worker.steps) == 2)
    assert worker.steps[1] == ["long", "short"]
    worker.let(1)
    reply = await short
    assert reply.results == (VerifyResult(seq_id="short", tokens=(7,)),)
    assert (reply.replica_id, reply.num_steps) == ("replica", 2)  # it waited for the first
    assert not long.done()
    worker.let(1)
    assert (await long).num_steps == 3
    assert worker.steps[2:] == [["long"]]


async def test_streams_share_steps(replica: Replica) -> None:
    streams = [await replica.open_stream() for _ in range(2)]
    first = await start(replica.verify([make_request("first")]))
    await wait_until(lambda: replica.worker.steps == [["first"]])
    calls = [
        await start(stream.call([make_request(seq_id)], timeout_s=PATIENCE_S))
        for stream, seq_id in zip(streams, "ab", strict=True)
    ]
    replica.worker.let(2)
    assert [(await call).results[0].seq_id for call in [first, *calls]] == ["first", "a", "b"]
    assert replica.worker.steps == [["first"], ["a", "b"]]
    for stream in streams:
        stream.close()


async def test_a_cancelled_call_releases_its_sequences(replica: Replica, verify: Verify) -> None:
    call = await start(verify(make_request("s", num_steps=5)))
    await wait_until(lambda: replica.worker.steps == [["s"]])
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    replica.worker.let(2)
    await wait_until(lambda: replica.worker.released == ["s"])
    again = await verify(make_request("s"))
    assert not again.results[0].is_released
    assert replica.worker.steps == [["s"], ["s"]]


async def test_a_lost_stream_releases_what_it_asked_for(replica: Replica) -> None:
    stream = await replica.open_stream()
    call = await start(stream.call([make_request("s", num_steps=5)], timeout_s=PATIENCE_S))
    await wait_until(lambda: replica.worker.steps == [["s"]])
    stream.transport.abort()
    with pytest.raises(WorkerLostError, match="the connection ended"):
        await call
    replica.worker.let(5)
    await wait_until(lambda: set(replica.worker.released) == {"hello", "s"})


async def test_a_lost_stream_releases_what_it_had_answers_for(replica: Replica) -> None:
    """But not what it had released itself, which another may ask for by now."""
    stream = await replica.open_stream()
    replica.worker.let(2)
    await stream.call([make_request("a"), make_request("b")], timeout_s=PATIENCE_S)
    stream.release(["b"])
    await stream.call([make_request("c")], timeout_s=PATIENCE_S)
    replica.worker.released.clear()
    stream.close()
    await wait_until(lambda: set(replica.worker.released) == {"hello", "a", "c"})


async def test_a_worker_that_fails_tells_all_its_callers(replica: Replica, verify: Verify) -> None:
    waiting = await start(verify(make_request("waiting")))
    await wait_until(lambda: replica.worker.steps == [["waiting"]])
    replica.check_health()
    replica.worker.error = MemoryError("out of memory")
    replica.worker.let(1)
    late = make_request("late")
    for call in [waiting, verify(late), replica.verify([late])]:
        with pytest.raises(WorkerFailedError, match="has failed: out of memory"):
            await call
    with pytest.raises(RuntimeError, match="the worker has failed"):
        replica.check_health()
    await wait_until(lambda: replica.ended_by is not None)
    assert replica.ended_by == "a step has failed: out of memory"


async def test_a_group_that_fails_blames_nobody(replica: Replica, verify: Verify) -> None:
    """Its steps fail too when another of its ranks is lost."""
    replica.worker.is_in_group = True
    waiting = await start(verify(make_request("waiting")))
    await wait_until(lambda: replica.worker.steps == [["waiting"]])
    replica.worker.error = RuntimeError("connection closed by peer")
    replica.worker.let(1)
    with pytest.raises(WorkerLostError, match="connection closed by peer") as lost:
        await waiting
    assert not isinstance(lost.value, WorkerFailedError)
    await wait_until(lambda: replica.ended_by is not None)


async def test_a_worker_that_cannot_be_made_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="replica"))
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)

    def fail() -> Worker:
        raise OSError("no such model")

    monkeypatch.setattr(f"{__name__}.Worker", fail)
    with pytest.raises(OSError, match="no such model"):
        await Replica.start()


async def test_a_worker_times_its_steps_before_its_first_call(replica: Replica) -> None:
    assert replica.worker.times_measured == [0]


async def test_a_replica_reports_where_it_listens_and_what_it_caches(replica: Replica) -> None:
    replica.worker.num_used_blocks = 3
    report = await replica.report()
    assert (report.address.replica_id, report.address.host) == ("replica", "127.0.0.1")
    assert report.num_cached_tokens == 48
