"""Many callers, one worker."""

import asyncio
from collections.abc import Callable

import pytest

from tests.deployments.replicas.step_loops import Clock, Loop, make_request, run
from tests.fakes import answer_of
from workers.errors import WorkerFailedError
from workers.types import Reply, VerifyResult


async def test_concurrent_calls_share_steps(start_loop: Callable[..., Loop]) -> None:
    loop = start_loop()
    batches = await asyncio.gather(
        *[run(loop, [make_request(f"{i}-{j}") for j in range(3)]) for i in range(5)]
    )
    assert [[r.seq_id for r in batch] for batch in batches] == [
        [f"{i}-{j}" for j in range(3)] for i in range(5)
    ]
    assert len({result.tokens for batch in batches for result in batch}) == 1
    assert loop.work.num_steps <= 2


async def test_a_bad_request_fails_alone(start_loop: Callable[..., Loop]) -> None:
    loop = start_loop()
    bad = make_request("bad", tokens=[1] * 500)
    good, refused = await run(loop, [make_request("good"), bad])
    assert "500 tokens" in refused.error
    assert good.tokens
    assert not good.error
    (again,) = await run(loop, [make_request("other")])
    assert again.tokens


async def test_a_reply_counts_the_steps_it_waited_for(start_loop: Callable[..., Loop]) -> None:
    """Not the one that answered the question before, however soon the next one comes."""
    loop = start_loop()
    replies: dict[str, Reply[VerifyResult]] = {}

    def keep(reply: Reply[VerifyResult] | Exception) -> None:
        assert isinstance(reply, Reply)
        replies[f"{reply.results[0].seq_id} {len(replies)}"] = reply

    def ask_on(reply: Reply[VerifyResult] | Exception) -> None:
        keep(reply)
        loop.submit([make_request("s", tokens=[9], base_len=3)], keep)
        loop.submit([make_request("another")], keep)

    loop.submit([make_request("s")], ask_on)
    async with asyncio.timeout(5):
        while len(replies) < 3:
            await asyncio.sleep(0.001)
    num_steps = {name: reply.num_steps for name, reply in replies.items()}
    assert num_steps == {"s 0": 1, "s 1": 1, "another 2": 2}
    assert [reply.num_tokens for reply in replies.values()] == [3, 4, 7]


async def test_a_worker_rests_when_all_is_answered(
    start_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = start_loop()
    steps_at_rest: list[int] = []
    monkeypatch.setattr(
        loop.worker, "park_threads", lambda: steps_at_rest.append(loop.work.num_steps)
    )
    for num_rests, request in enumerate((make_request("long", tokens=[3] * 40), make_request("s"))):
        await run(loop, [request])
        async with asyncio.timeout(5):
            while len(steps_at_rest) == num_rests:
                await asyncio.sleep(0.001)
    assert steps_at_rest == [3, 4]


async def test_an_empty_call_is_answered(start_loop: Callable[..., Loop]) -> None:
    assert await run(start_loop(), []) == ()


async def test_an_answer_that_cannot_be_given_harms_no_other(
    start_loop: Callable[..., Loop], caplog: pytest.LogCaptureFixture
) -> None:
    loop = start_loop()

    def fail(_: object) -> None:
        raise ValueError("too long")

    loop.submit([make_request("s")], fail)
    (result,) = await run(loop, [make_request("other")])
    assert result.tokens
    assert "too long" in caplog.text


async def test_cancelling_a_call_frees_its_sequences(start_loop: Callable[..., Loop]) -> None:
    loop = start_loop()
    call = asyncio.create_task(run(loop, [make_request("long", tokens=[3] * 250)]))
    while loop.worker.num_used_blocks == 0:
        await asyncio.sleep(0.001)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    async with asyncio.timeout(5):
        while loop.worker.num_used_blocks:
            await asyncio.sleep(0.001)
    assert loop.worker.num_sequences == 0


async def test_a_released_call_is_answered_as_such(start_loop: Callable[..., Loop]) -> None:
    loop = start_loop()
    call = asyncio.create_task(run(loop, [make_request("long", tokens=[3] * 250)]))
    await asyncio.sleep(0)
    loop.release(["long"])
    (result,) = await call
    assert result.is_released


async def test_asking_again_answers_the_earlier_call_as_released(
    start_loop: Callable[..., Loop],
) -> None:
    loop = start_loop()
    first = asyncio.create_task(run(loop, [make_request("s", tokens=[3] * 200)]))
    while loop.work.num_steps == 0:  # of the thirteen that the tokens need
        await asyncio.sleep(0)
    (second,) = await run(loop, [make_request("s", tokens=[3] * 200)])
    assert (await first)[0].is_released
    assert second.tokens
    assert not second.is_released


async def test_idle_sequences_are_forgotten(
    start_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.replicas.step_loop.SWEEP_S", 0.01)
    clock = Clock()
    loop = start_loop(clock)
    await run(loop, [make_request("old")])
    clock.now = 60.0
    await run(loop, [make_request("young")])
    clock.now = 120.0
    async with asyncio.timeout(5):
        while loop.worker.num_sequences == 2:
            await asyncio.sleep(0.01)
    (lost,) = await run(loop, [make_request("old", tokens=[9], base_len=3)])
    (kept,) = await run(loop, [make_request("young", tokens=[9], base_len=3)])
    assert (lost.needs_tokens_from, kept.needs_tokens_from) == (0, None)


@pytest.mark.parametrize("function", ["submit", "step"])
async def test_a_worker_that_fails_tells_its_callers(
    function: str, start_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = start_loop()

    def fail(*_: object) -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr(loop.worker, function, fail)
    with pytest.raises(WorkerFailedError, match="the worker has failed: out of memory"):
        await run(loop, [make_request("s")])
    assert isinstance(loop.failure, MemoryError)
    with pytest.raises(WorkerFailedError, match="the worker has failed"):
        await run(loop, [make_request("s")])


async def test_a_sweep_that_fails_is_logged_and_not_the_last(
    start_loop: Callable[..., Loop],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("deployments.replicas.step_loop.SWEEP_S", 0.005)
    clock = Clock()
    loop = start_loop(clock)
    await run(loop, [make_request("old")])
    sweep = loop._sweep_once
    errors = iter([ArithmeticError("a defect")])

    def fail_once() -> None:
        for error in errors:
            raise error
        sweep()

    monkeypatch.setattr(loop, "_sweep_once", fail_once)
    clock.now = 200.0
    async with asyncio.timeout(5):
        while loop.worker.num_sequences:
            await asyncio.sleep(0.001)
    assert "a defect" in caplog.text


async def test_a_call_that_waits_long_is_told_so_and_goes_on_where_it_was(
    start_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.replicas.step_loop.SWEEP_S", 0.005)
    clock = Clock()
    loop = start_loop(clock)
    tokens = [3, 4, 5, 6] * 60
    call = asyncio.create_task(run(loop, [make_request("long", tokens=tokens)]))
    while loop.work.num_steps == 0:
        await asyncio.sleep(0.001)
    clock.now = 21.0
    (told,) = await call
    assert told.needs_tokens_from is not None
    assert 0 < told.needs_tokens_from < len(tokens)
    (result,) = await run(
        loop, [make_request("long", tokens[told.needs_tokens_from :], told.needs_tokens_from)]
    )
    (whole,) = await run(loop, [make_request("other", tokens=tokens)])
    assert result.tokens == whole.tokens


def switch_forward(loop: Loop) -> None:
    """As when a compiled forward takes over."""
    paged = loop.worker._paged
    own = paged.forward
    paged.forward = lambda inputs: own(inputs)


async def test_an_idle_worker_times_its_steps_anew(start_loop: Callable[..., Loop]) -> None:
    loop = start_loop()
    loop.worker.step_table.measure()
    assert (await answer_of(loop, [make_request("s")])).steps_version == 0
    switch_forward(loop)
    loop._sweep_once()
    async with asyncio.timeout(20):
        while loop.worker.step_table.is_outdated:
            await asyncio.sleep(0.001)
    assert (await answer_of(loop, [make_request("t")])).steps_version == 1
    assert loop.work.num_tokens == 6  # timed steps are not counted


async def test_a_busy_worker_times_at_most_one_step_beside_each(
    start_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = start_loop()
    table = loop.worker.step_table
    table.measure()
    switch_forward(loop)
    time_one_step = table.time_one_step
    steps_when_timed: list[int] = []

    def note() -> float:
        steps_when_timed.append(loop.work.num_steps)
        return time_one_step()

    monkeypatch.setattr(table, "time_one_step", note)
    results = await run(loop, [make_request("s", [7] * 200)])
    assert steps_when_timed[0] < loop.work.num_steps
    again = await run(loop, [make_request("s2", [7] * 200)])
    assert results[0].tokens == again[0].tokens
    assert len(set(steps_when_timed)) == len(steps_when_timed)


async def test_steps_are_measured_at_once_where_another_forward_runs_them(
    start_loop: Callable[..., Loop],
) -> None:
    loop = start_loop()
    table = loop.worker.step_table
    table.measure()
    loop.measure_steps()
    assert table.version == 0
    switch_forward(loop)
    loop.measure_steps()
    assert (table.version, table.is_outdated) == (1, False)
