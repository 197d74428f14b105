"""Whether a router says that it cannot serve, and why."""

import asyncio

import httpx
import pytest

from deployments.router import health as health_module
from deployments.router.health import Health, watch_targets
from tests.deployments.loops import Models, wait_until
from tests.deployments.serving import (
    LocalServing,
    body,
    client_of,
    complete,
    local_serving,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(recovery_timeout_s=60.0, stall_timeout_s=300.0, clock=clock)


def test_a_router_that_starts_is_ready(health: Health) -> None:
    assert health.why_not_ready() is None
    assert health.why_unhealthy(num_live=0) is None


def test_one_failed_probe_is_forgiven_two_are_not(health: Health, clock: Clock) -> None:
    health.target_failed("no answer within 5 s")
    assert health.why_not_ready() is None
    clock.now_s += 10
    health.target_failed("no answer within 5 s")
    assert health.why_not_ready() == ("no target group has answered for 10 s: no answer within 5 s")
    assert health.why_unhealthy(num_live=0) is None
    health.target_answered()
    assert health.why_not_ready() is None
    health.target_failed("no answer within 5 s")
    assert health.why_not_ready() is None


def test_targets_that_are_silent_for_longer_than_recovery_takes_are_a_fault(
    health: Health, clock: Clock
) -> None:
    for _ in range(2):
        health.target_failed("the last call failed")
    clock.now_s += 59
    assert health.why_unhealthy(num_live=0) is None
    clock.now_s += 2
    assert "for 61 s: the last call failed" in str(health.why_unhealthy(num_live=0))
    health.target_answered()
    assert health.why_unhealthy(num_live=0) is None


def test_a_probe_that_never_ends_is_a_failed_one(health: Health, clock: Clock) -> None:
    clock.now_s += 61
    assert health.why_not_ready() is not None
    assert health.why_unhealthy(num_live=0) is not None


def test_a_recovery_time_shorter_than_a_probe_fails_nobody(clock: Clock) -> None:
    health = Health(recovery_timeout_s=0.5, stall_timeout_s=300.0, clock=clock)
    clock.now_s += 4
    assert health.why_unhealthy(num_live=0) is None


def test_completions_that_get_nothing_are_a_fault(health: Health, clock: Clock) -> None:
    clock.now_s += 1000
    health.target_answered()
    assert health.why_unhealthy(num_live=0) is None  # there was nothing to do
    health.progressed()
    clock.now_s += 299
    health.target_answered()
    assert health.why_unhealthy(num_live=2) is None
    clock.now_s += 2
    assert "2 completions run, but none has got anything for 301 s" in str(
        health.why_unhealthy(num_live=2)
    )
    health.progressed()
    assert health.why_unhealthy(num_live=2) is None


async def test_the_probe_goes_on_whatever_it_gets(
    health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_module, "PROBE_PERIOD_S", 0.0)
    monkeypatch.setattr(health_module, "PROBE_TIMEOUT_S", 0.02)
    answers: list[Exception | float] = [ValueError("a defect"), OSError("gone"), 60.0]
    num_asked = 0
    seen = []

    async def ask() -> None:
        nonlocal num_asked
        num_asked += 1
        seen.append(health.why_not_ready())
        if answers:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            await asyncio.sleep(answer)

    task = asyncio.create_task(watch_targets(health, ask))
    await wait_until(lambda: num_asked >= 6)
    task.cancel()
    assert seen[:2] == [None, None]
    assert "the last call failed" in str(seen[2])
    assert "no answer within" in str(seen[3])
    assert seen[4:6] == [None, None]


async def test_a_router_that_serves_says_so(client: httpx.AsyncClient) -> None:
    for path, word in (("/health", "ok"), ("/ready", "ready")):
        response = await client.get(path)
        assert response.status_code == 200
        assert response.json() == {"status": word, "model": "tiny"}


async def test_without_a_target_it_is_not_ready_and_then_not_healthy(
    client: httpx.AsyncClient, serving: LocalServing
) -> None:
    for _ in range(2):
        serving.health.target_failed("the last call failed")
    response = await client.get("/ready")
    assert response.status_code == 503
    assert response.json()["status"] == "not ready"
    assert "the last call failed" in response.json()["reason"]
    assert (await client.head("/ready")).status_code == 503
    await asyncio.sleep(0.6)  # the recovery time is over
    response = await client.get("/health")
    assert response.status_code == 503
    assert response.json()["status"] == "not ok"
    assert (await client.head("/health")).status_code == 503
    serving.health.target_answered()
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/ready")).status_code == 200


async def test_a_round_loop_that_stands_is_seen(models: Models) -> None:
    clock = Clock()
    async with local_serving(models.target, clock=clock) as serving, client_of(serving) as client:
        await complete(client)
        clock.now_s += 1000
        serving.health.target_answered()
        assert (await client.get("/health")).status_code == 200
        await serving.loop.close()  # as good as dead: what is added to it never runs
        request = asyncio.create_task(client.post("/v1/completions", json=body()))
        await wait_until(lambda: serving.loop.num_live == 1)
        assert (await client.get("/health")).status_code == 200
        clock.now_s += 31
        serving.health.target_answered()
        response = await client.get("/health")
        assert response.status_code == 503
        assert "1 completions run, but none has got anything" in response.json()["reason"]
        request.cancel()
