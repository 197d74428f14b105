"""Streams to replicas that come and go."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from deployments.transport import worker_streams
from deployments.transport.messages import VERIFY, ReplicaReport
from deployments.transport.worker_streams import WorkerStreams
from tests.deployments.loops import wait_until
from tests.deployments.transport.streams import PATIENCE_S, Client, Cluster, Replica, make_request
from workers.errors import WorkerFailedError, WorkerLostError, WorkerTimeoutError


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_streams, "REFRESH_S", 0.01)
    monkeypatch.setattr(worker_streams, "SEARCH_S", 0.01)


@asynccontextmanager
async def running(*names: str) -> AsyncIterator[tuple[Cluster, Client]]:
    replicas = [Replica(name) for name in names]
    for replica in replicas:
        await replica.listen()
    cluster = Cluster(*replicas)
    client: Client = WorkerStreams(cluster, VERIFY, on_new_steps=cluster.note_new_steps)
    await wait_until(lambda: set(client._streams) == set(names))
    yield cluster, client
    client.close()
    for replica in replicas:
        replica.server.close()


async def ask(client: Client, replica_id: str | None = None, *, num_tokens: int = 3) -> str:
    """Which replica answers."""
    request = make_request(new_tokens=(1,) * num_tokens)
    return (await client.call(replica_id, [request], timeout_s=PATIENCE_S)).replica_id


async def test_a_new_sequence_goes_to_the_replica_that_caches_least() -> None:
    async with running("a", "b") as (cluster, client):
        a, b = cluster.listed
        a.num_cached_tokens, b.num_cached_tokens = 500, 100
        num_asked = cluster.num_asked
        await wait_until(lambda: cluster.num_asked > num_asked + 1)
        assert [await ask(client, num_tokens=150) for _ in range(3)] == ["b", "b", "b"]
        assert await ask(client, num_tokens=150) == "a"  # for what was sent to the other since


async def test_new_step_times_are_told_of_once_for_each_replica() -> None:
    async with running("a", "b") as (cluster, client):
        for replica, version, num_told in [(0, 0, 0), (0, 1, 1), (1, 1, 2), (0, 1, 2), (0, 2, 3)]:
            cluster.listed[replica].steps_version = version
            await ask(client, "ab"[replica])
            assert cluster.num_new_steps == num_told


async def test_a_replica_in_place_of_another_has_new_step_times_too() -> None:
    """Its count of them begins anew."""
    async with running("a") as (cluster, client):
        cluster.listed[0].steps_version = 1
        await ask(client)
        cluster.listed[0].server.close()
        await wait_until(lambda: not client._open_streams())
        other = Replica("b")
        await other.listen()
        other.steps_version = 1
        cluster.listed = [other]
        await ask(client)
        assert cluster.num_new_steps == 2
        other.server.close()


async def test_a_replica_that_hangs_gets_no_new_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_streams, "SILENT_S", 0.05)
    async with running("a", "b") as (cluster, client):
        hangs, answers = cluster.listed
        answers.num_cached_tokens = 10_000
        await wait_until(lambda: client._reported["b"] == 10_000)
        hangs.may_answer.clear()
        call = asyncio.create_task(ask(client))
        await wait_until(lambda: client._streams["a"].silent_s > 0.05)
        assert {await ask(client) for _ in range(5)} == {"b"}
        hangs.may_answer.set()
        assert await call == "a"
        assert await ask(client) == "a"


async def test_a_sequence_stays_with_its_replica() -> None:
    async with running("a", "b") as (cluster, client):
        cluster.listed[0].num_cached_tokens = 10_000
        for _ in range(5):
            assert await ask(client, "a") == "a"


async def test_a_replica_that_is_no_longer_listed_keeps_its_sequences_and_gets_no_new() -> None:
    """Serve is about to end it."""
    async with running("a", "b") as (cluster, client):
        del cluster.listed[0]
        await wait_until(lambda: set(client._reported) == {"b"})
        assert {await ask(client) for _ in range(10)} == {"b"}
        assert await ask(client, "a") == "a"


async def test_a_new_replica_is_found() -> None:
    async with running("a") as (cluster, client):
        cluster.listed[0].num_cached_tokens = 100
        new = Replica("b")
        await new.listen()
        cluster.listed.append(new)
        await wait_until(lambda: "b" in client._streams)
        assert await ask(client) == "b"
        new.server.close()


async def test_another_takes_the_place_of_a_lost_one() -> None:
    async with running("a", "b") as (cluster, client):
        lost, _ = cluster.listed
        lost.may_answer.clear()
        call = asyncio.create_task(ask(client, "a"))
        await wait_until(lambda: lost.num_calls == 1)
        lost.server.close()
        with pytest.raises(WorkerLostError) as error:
            await call
        assert not isinstance(error.value, WorkerTimeoutError | WorkerFailedError)
        assert await ask(client, "a") == "b"


async def test_a_call_waits_for_a_replica_to_come() -> None:
    cluster = Cluster()
    client: Client = WorkerStreams(cluster, VERIFY)
    call = asyncio.create_task(ask(client))
    await wait_until(lambda: cluster.num_asked > 2)
    replica = Replica()
    await replica.listen()
    cluster.listed.append(replica)
    assert await call == "replica"
    client.close()
    replica.server.close()


async def test_that_the_only_replica_is_lost_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a round without drafts goes on."""
    monkeypatch.setattr(worker_streams, "FIND_TIMEOUT_S", 3600.0)
    async with running("a") as (cluster, client):
        cluster.listed.pop().server.close()
        await wait_until(lambda: not client._open_streams())
        with pytest.raises(WorkerTimeoutError, match="no worker was reached"):
            async with asyncio.timeout(PATIENCE_S):
                await client.call("a", [make_request()], timeout_s=3600.0)


async def test_without_a_replica_a_call_says_so_and_blames_nobody() -> None:
    client: Client = WorkerStreams(Cluster(), VERIFY)
    with pytest.raises(WorkerTimeoutError, match=r"no worker was reached in 0\.1 s: nobody is"):
        await client.call(None, [make_request()], timeout_s=0.1)
    client.release("gone", ["s"])
    client.close()


async def test_a_replica_that_cannot_be_reached_is_named_once_and_another_serves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As behind a firewall that lets Ray through and no other port."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        async with running("a") as (cluster, client):
            hidden = Replica("hidden")
            await hidden.listen()
            report = replace(hidden.report, address=replace(hidden.report.address, port=port))
            list_open = cluster.replicas

            async def replicas() -> list[ReplicaReport]:
                return [report, *await list_open()]

            async def only_hidden() -> list[ReplicaReport]:
                return [report]

            cluster.replicas = replicas  # type: ignore[method-assign]
            num_asked = cluster.num_asked
            await wait_until(lambda: cluster.num_asked > num_asked + 3)
            assert {await ask(client) for _ in range(10)} == {"a"}
            said = [line for line in caplog.messages if f"reached at 127.0.0.1:{port}" in line]
            assert len(said) == 1
            assert "nodes must reach each other's ports" in said[0]
            cluster.listed[0].server.close()
            del cluster.listed[0]
            cluster.replicas = only_hidden  # type: ignore[method-assign]
            await wait_until(lambda: not client._open_streams())
            with pytest.raises(WorkerTimeoutError, match=f"hidden cannot be reached at .*:{port}"):
                await client.call(None, [make_request()], timeout_s=0.1)
            hidden.server.close()


async def test_a_directory_that_fails_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Cluster):
        async def replicas(self) -> list[ReplicaReport]:
            if self.num_asked < 2:
                self.num_asked += 1
                raise ArithmeticError("a defect")
            return await super().replicas()

    replica = Replica()
    await replica.listen()
    client: Client = WorkerStreams(Failing(replica), VERIFY)
    assert await ask(client) == "replica"
    assert "ArithmeticError: a defect" in caplog.text
    client.close()
    replica.server.close()


async def test_replicas_that_have_gone_are_not_remembered() -> None:
    """As over months of updates."""
    async with running() as (cluster, client):
        for number in range(20):
            replica = Replica(f"replica-{number}")
            await replica.listen()
            cluster.listed = [replica]
            assert await ask(client) == replica.name
            replica.server.close()
            await wait_until(lambda: not client._open_streams())
        await wait_until(lambda: len(client._streams) + len(client._unreachable) <= 2)
        assert len(client._loads._sent) <= 2


class TestFind:
    async def test_the_one_that_answers_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worker_streams, "FIND_TIMEOUT_S", PATIENCE_S)
        async with running("a", "b") as (cluster, client):
            hangs, answers = cluster.listed
            hangs.may_answer.clear()
            assert await client.find() == "b"
            assert answers.num_calls == 1

    async def test_none_is_found_where_none_answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worker_streams, "FIND_TIMEOUT_S", 0.1)
        async with running("a", "b") as (cluster, client):
            for replica in cluster.listed:
                replica.may_answer.clear()
            with pytest.raises(WorkerTimeoutError, match="none of 2 replicas answers"):
                await client.find()

    async def test_none_is_found_where_there_is_none(self, monkeypatch: Any) -> None:
        monkeypatch.setattr(worker_streams, "FIND_TIMEOUT_S", 0.05)
        client: Client = WorkerStreams(Cluster(), VERIFY)
        with pytest.raises(WorkerTimeoutError, match="no worker was reached"):
            await client.find()
        client.close()
