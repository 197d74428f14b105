"""The round loop under random faults: afterwards nothing is held and every stream has ended.

Cases by `--cases`: a few hundred in the test suite, thousands by `make fuzz`. Workers are scripted,
so that a case takes milliseconds: their tokens are a function of the sequence's seed and the
position alone, and they keep to the contract of soft state to the letter.
"""

import asyncio
import logging
import random
import time
from collections.abc import Iterator, Sequence

import pytest

from deployments.router.drafting.lookup import PromptLookup
from deployments.router.drafting.overlap import FixedOverlap
from deployments.router.drafting.protocol import Drafter
from deployments.router.drafting.remote import PooledDrafter
from deployments.router.loop import LoopOptions, RoundLoop
from deployments.router.sequence import GenerationParams
from deployments.router.speculation import Policies
from tests.deployments.loops import Stream
from tests.deployments.router.faulty_world import (
    NUM_TOKENS_OF_ALPHABET,
    Drafters,
    Policy,
    RaisingLookup,
    Targets,
    World,
    token_at,
)
from tests.fakes import RecordingObserver
from workers.errors import GenerationFailedError
from workers.sampling_params import SamplingParams

CASES_AT_A_TIME = 25


async def run_case(seed: int) -> None:
    world = World.draw(seed)
    targets, replicas, observer = Targets(world), Drafters(world), RecordingObserver()
    drafters = draw_drafters(world, replicas)
    loop = RoundLoop(
        targets=targets,
        drafters=drafters,
        policies=Policies(
            gamma=Policy(world),
            overlap=FixedOverlap(is_on=world.happens(0.5)),
            max_gamma=8,
            max_model_len=400,
        ),
        observer=observer,
        options=LoopOptions(verify_timeout_s=5.0, recovery_timeout_s=20.0),
        clock=time.monotonic,
    )
    streams = [Stream(params) for params in draw_params(world.rng)]
    cancelled: set[str] = set()
    try:
        async with asyncio.timeout(60):
            await asyncio.gather(*[live_through(loop, world, s, cancelled) for s in streams])
            while is_busy(loop, drafters) or any(world.caches.values()) or replicas.held:
                await asyncio.sleep(0.001)
        check(world, loop, drafters, streams, cancelled, observer)
    finally:
        await loop.close()


def draw_drafters(world: World, replicas: Drafters) -> list[Drafter]:
    """Any list of drafters, each at most once, in any order; perhaps none."""
    pool = PooledDrafter(replicas, timeout_s=1.0, max_model_len=world.rng.choice([60, 400]))
    drafters: list[Drafter] = [pool, RaisingLookup(world, is_last=world.happens(0.5))]
    world.rng.shuffle(drafters)
    return drafters[: world.rng.choice([0, 1, 1, 2, 2])]


def is_busy(loop: RoundLoop, drafters: Sequence[Drafter]) -> bool:
    """Whether rounds, drafters or releases are under way; if for ever, the case fails."""
    pools = [drafter for drafter in drafters if isinstance(drafter, PooledDrafter)]
    return bool(loop.num_live or loop._tasks or not all(pool.is_idle for pool in pools))


def draw_params(rng: random.Random) -> list[GenerationParams]:
    return [
        GenerationParams(
            prompt=tuple(rng.choices(range(NUM_TOKENS_OF_ALPHABET), k=rng.choice([1, 5, 40, 150]))),
            max_tokens=rng.choice([1, 3, 20, 50]),
            sampling=SamplingParams(temperature=rng.choice([0.0, 1.0])),
            seed=index,
        )
        for index in range(rng.randint(1, 6))
    ]


async def live_through(loop: RoundLoop, world: World, stream: Stream, cancelled: set[str]) -> None:
    """Add a sequence at some time; await its end, or cancel it at some time."""
    await world.pass_time()
    loop.add(stream.sequence)
    if world.happens(world.cancels):
        for _ in range(world.rng.choice([0, 1, 5, 20])):
            await world.pass_time()
        if not stream.sequence.is_done:
            cancelled.add(stream.sequence.seq_id)
        loop.cancel(stream.sequence)
    else:
        await stream.sequence.done.wait()


def check(
    world: World,
    loop: RoundLoop,
    drafters: Sequence[Drafter],
    streams: Sequence[Stream],
    cancelled: set[str],
    observer: RecordingObserver,
) -> None:
    assert (loop.num_live, observer.num_live, loop._busy_targets) == (0, 0, set())
    chain = loop._speculation._chain
    assert not chain._silenced
    assert not any(drafter._prefetched for drafter in chain.remote)
    assert not any(len(d) for d in drafters if isinstance(d, PromptLookup))
    assert world.num_poisoned <= 4
    for stream in streams:
        sequence = stream.sequence
        first, num_tokens = sequence.prompt_len, sequence.params.max_tokens
        right = [token_at(sequence.params.seed, first + index) for index in range(num_tokens)]
        if sequence.seq_id in cancelled:
            assert stream.token_ids == right[: len(stream.token_ids)]
        elif stream.error is not None:
            # only one that lost worker after worker, or whose own calls failed again and again
            assert isinstance(stream.error, GenerationFailedError), stream.error
            assert world.most_losses.get(sequence.seq_id, 0) >= 2 or world.fails > 0
        else:
            assert stream.token_ids == right
            assert sequence.seq_id != world.poison
        counts = sequence.counts
        assert counts.num_accepted <= counts.num_tested <= counts.num_draft_tokens
        assert counts.num_accepted <= sequence.num_output_tokens


@pytest.fixture
def no_log() -> Iterator[None]:
    """It would have thousands of lines."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)  # loggers forget what they have cached


@pytest.mark.usefixtures("no_log")
async def test_whatever_fails_every_stream_ends_right_and_nothing_is_held(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.router.live.FIRST_RETRY_S", 0.002)
    monkeypatch.setattr("deployments.router.live.LAST_RETRY_S", 0.01)
    num_cases: int = pytestconfig.getoption("--cases")
    for first in range(0, num_cases, CASES_AT_A_TIME):
        seeds = range(first, min(num_cases, first + CASES_AT_A_TIME))
        ended = await asyncio.gather(*map(run_case, seeds), return_exceptions=True)
        for seed, error in zip(seeds, ended, strict=True):
            if error is not None:
                raise AssertionError(f"case {seed} failed") from error
