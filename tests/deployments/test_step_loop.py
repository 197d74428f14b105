"""Many callers, one worker."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from deployments.step_loop import StepLoop
from tests.tiny_models import save_model
from workers.errors import ContextLengthError
from workers.model import Model, load_model
from workers.paged_model import CacheOptions
from workers.target import Target
from workers.types import Reply, SamplingParams, VerifyRequest, VerifyResult

Loop = StepLoop[VerifyRequest, VerifyResult]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    name = save_model(tmp_path_factory.mktemp("model"))
    return load_model(name, dtype="float32", device="cpu")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def start_loop(model: Model) -> AsyncIterator[Callable[..., Loop]]:
    loops: list[Loop] = []

    def start(clock: Callable[[], float] = time.monotonic) -> Loop:
        cache = CacheOptions(block_size=4, max_num_seqs=16)
        loop: Loop = StepLoop(
            lambda: Target(model, cache, max_batched_tokens=16),
            idle_timeout_s=100,
            clock=clock,
        )
        loops.append(loop)
        return loop

    yield start
    for loop in loops:
        await loop.close()


def make_request(
    seq_id: str, tokens: Sequence[int] = (5, 6, 7), base_len: int = 0
) -> VerifyRequest:
    return VerifyRequest(
        seq_id=seq_id, base_len=base_len, new_tokens=tuple(tokens), prompt_len=1, sampling=GREEDY
    )


async def test_concurrent_calls_share_steps(start_loop: Callable[..., Loop]) -> None:
    loop = start_loop()
    batches = await asyncio.gather(
        *[loop.run_batch([make_request(f"{i}-{j}") for j in range(3)]) for i in range(5)]
    )
    assert [[r.seq_id for r in batch] for batch in batches] == [
        [f"{i}-{j}" for j in range(3)] for i in range(5)
    ]
    assert len({result.tokens for batch in batches for result in batch}) == 1
    assert loop.work.num_steps <= 2


async def test_a_bad_request_fails_alone(start_loop: Callable[..., Loop]) -> None:
    loop = start_loop()
    bad = make_request("bad", tokens=[1] * 500)
    good, refused = await asyncio.gather(
        loop.run_batch([make_request("good")]), loop.run_batch([bad]), return_exceptions=True
    )
    assert isinstance(refused, ContextLengthError)
    assert not isinstance(good, BaseException)
    assert good[0].tokens
    (again,) = await loop.run_batch([make_request("other")])
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
    monkeypatch.setattr(loop.worker, "rest", lambda: steps_at_rest.append(loop.work.num_steps))
    await loop.run_batch([make_request("long", tokens=[3] * 40)])
    await loop.run_batch([make_request("s")])
    async with asyncio.timeout(5):
        while len(steps_at_rest) < 2:
            await asyncio.sleep(0.001)
    assert steps_at_rest == [3, 4]


async def test_running_sequences_are_in_every_step_of_a_long_prompt(
    start_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come back soon after a step, but not at once, as their callers draft first."""
    loop = start_loop()
    step = loop.worker.step

    def slow_step() -> tuple[list[VerifyResult], bool]:
        time.sleep(0.02)
        return step()

    monkeypatch.setattr(loop.worker, "step", slow_step)
    tokens = [5, 6, 7]
    num_cached = 0

    async def go_on() -> None:
        nonlocal num_cached
        (result,) = (await loop.run([make_request("short", tokens[num_cached:], num_cached)])).results
        num_cached = len(tokens)
        tokens.append(result.tokens[0])
        await asyncio.sleep(0.001)

    for _ in range(8):  # how soon they come back is learnt
        await go_on()
    before = loop.work.num_steps
    long = asyncio.create_task(loop.run([make_request("long", [8] * 150)]))
    num_rounds = 0
    while not long.done():
        await go_on()
        num_rounds += 1
    num_steps = loop.work.num_steps - before
    assert num_steps >= 9
    assert num_rounds >= 0.8 * num_steps


async def test_an_empty_call_is_answered(start_loop: Callable[..., Loop]) -> None:
    assert await start_loop().run_batch([]) == ()


async def test_an_answer_that_cannot_be_given_harms_no_other(
    start_loop: Callable[..., Loop], caplog: pytest.LogCaptureFixture
) -> None:
    loop = start_loop()

    def fail(_: object) -> None:
        raise ValueError("too long")

    loop.submit([make_request("s")], fail)
    (result,) = await loop.run_batch([make_request("other")])
    assert result.tokens
    assert "too long" in caplog.text


async def test_cancelling_a_call_frees_its_sequences(start_loop: Callable[..., Loop]) -> None:
    loop = start_loop()
    call = asyncio.create_task(loop.run_batch([make_request("long", tokens=[3] * 250)]))
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
    call = asyncio.create_task(loop.run_batch([make_request("long", tokens=[3] * 250)]))
    await asyncio.sleep(0)
    loop.release(["long"])
    (result,) = await call
    assert result.is_released


async def test_asking_again_answers_the_earlier_call_as_released(
    start_loop: Callable[..., Loop],
) -> None:
    loop = start_loop()
    first = asyncio.create_task(loop.run_batch([make_request("s", tokens=[3] * 200)]))
    while loop.work.num_steps == 0:  # of the thirteen that the tokens need
        await asyncio.sleep(0)
    (second,) = await loop.run_batch([make_request("s", tokens=[3] * 200)])
    assert (await first)[0].is_released
    assert second.tokens
    assert not second.is_released


async def test_idle_sequences_are_forgotten(
    start_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.step_loop.SWEEP_S", 0.01)
    clock = Clock()
    loop = start_loop(clock)
    await loop.run_batch([make_request("old")])
    clock.now = 60.0
    await loop.run_batch([make_request("young")])
    clock.now = 120.0
    async with asyncio.timeout(5):
        while loop.worker.num_sequences == 2:
            await asyncio.sleep(0.01)
    (lost,) = await loop.run_batch([make_request("old", tokens=[9], base_len=3)])
    (kept,) = await loop.run_batch([make_request("young", tokens=[9], base_len=3)])
    assert (lost.needs_tokens_from, kept.needs_tokens_from) == (0, None)


async def test_a_worker_that_fails_tells_its_callers(
    start_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = start_loop()

    def fail() -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr(loop.worker, "step", fail)
    with pytest.raises(RuntimeError, match="the worker has failed: out of memory"):
        await loop.run_batch([make_request("s")])
    assert isinstance(loop.failure, MemoryError)
    with pytest.raises(RuntimeError, match="the worker has failed"):
        await loop.run_batch([make_request("s")])


async def test_a_call_that_waits_long_is_told_so_and_goes_on_where_it_was(
    start_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.step_loop.SWEEP_S", 0.005)
    clock = Clock()
    loop = start_loop(clock)
    tokens = [3, 4, 5, 6] * 60
    call = asyncio.create_task(loop.run_batch([make_request("long", tokens=tokens)]))
    while loop.work.num_steps == 0:
        await asyncio.sleep(0.001)
    clock.now = 21.0
    (told,) = await call
    assert told.needs_tokens_from is not None
    assert 0 < told.needs_tokens_from < len(tokens)
    (result,) = await loop.run_batch(
        [make_request("long", tokens[told.needs_tokens_from :], told.needs_tokens_from)]
    )
    (whole,) = await loop.run_batch([make_request("other", tokens=tokens)])
    assert result.tokens == whole.tokens
