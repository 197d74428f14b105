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
from dataclasses import dataclass, field
from typing import Any

import pytest

from deployments.router.drafting.lookup import PromptLookup
from deployments.router.drafting.overlap import FixedOverlap
from deployments.router.drafting.protocol import Drafter
from deployments.router.drafting.remote import PooledDrafter
from deployments.router.loop import LoopOptions, RoundLoop
from deployments.router.policy.gamma import FixedGamma
from deployments.router.sequence import GenerationParams
from deployments.router.sequence import Sequence as LiveSequence
from deployments.router.speculation import Policies
from tests.deployments.loops import Stream
from tests.fakes import RecordingObserver
from workers.errors import GenerationFailedError, WorkerFailedError, WorkerLostError
from workers.types import (
    DraftTokens,
    ProposeRequest,
    ProposeResult,
    Reply,
    SamplingParams,
    VerifyRequest,
    VerifyResult,
)
from workers.verification import accept_matching

NUM_TOKENS_OF_ALPHABET = 6
"""Few, so that wrong drafts are right at times."""
CASES_AT_A_TIME = 25
FAULTLESS = 0.0


def token_at(seed: int, position: int) -> int:
    """The only right token there."""
    return random.Random(seed * 1_000_003 + position).randrange(NUM_TOKENS_OF_ALPHABET)


@dataclass(kw_only=True)
class World:
    """One case: how often what goes wrong."""

    rng: random.Random
    loses: float
    fails: float
    drafter_raises: float
    drafter_lies: float
    policy_raises: float
    cancels: float
    poison: str | None
    """A sequence that ends every worker that runs it."""
    caches: dict[str, dict[str, int]] = field(default_factory=dict)
    """By replica and sequence: how many tokens are cached there."""
    num_started: int = 0
    num_losses: dict[str, int] = field(default_factory=dict)
    """How many workers each sequence has lost since it last made progress."""
    most_losses: dict[str, int] = field(default_factory=dict)
    num_poisoned: int = 0

    @classmethod
    def draw(cls, seed: int) -> "World":
        rng = random.Random(seed)

        def maybe(most: float) -> float:
            return rng.choice([FAULTLESS, rng.uniform(0.0, most)])

        return cls(
            rng=rng,
            loses=maybe(0.15),
            fails=maybe(0.05),
            drafter_raises=maybe(0.5),
            drafter_lies=maybe(0.5),
            policy_raises=maybe(0.3),
            cancels=maybe(0.5),
            poison=rng.choice([None, None, "s0"]),
        )

    def happens(self, probability: float) -> bool:
        return self.rng.random() < probability

    def start_replica(self) -> None:
        self.caches[f"replica-{self.num_started}"] = {}
        self.num_started += 1

    async def pass_time(self) -> None:
        """A few turns of the event loop, or a moment."""
        if self.happens(0.1):
            await asyncio.sleep(self.rng.uniform(0.0, 0.003))
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)


class Targets:
    """Target replicas that end at random, with or without a word."""

    def __init__(self, world: World) -> None:
        self.world = world
        for _ in range(world.rng.choice([1, 2, 3])):
            world.start_replica()

    async def find(self) -> str:
        await self.world.pass_time()
        return self.world.rng.choice(list(self.world.caches))

    def release(self, replica_id: str, seq_ids: Sequence[str]) -> None:
        for seq_id in seq_ids:
            self.world.caches.get(replica_id, {}).pop(seq_id, None)

    async def call(
        self,
        replica_id: str | None,
        batch: Sequence[VerifyRequest],
        *,
        timeout_s: float,  # noqa: ARG002
    ) -> Reply[VerifyResult]:
        world = self.world
        replica_id = (
            replica_id if replica_id in world.caches else world.rng.choice(list(world.caches))
        )
        await world.pass_time()
        is_poisoned = world.poison in {request.seq_id for request in batch}
        world.num_poisoned += is_poisoned
        if is_poisoned or world.happens(world.loses):
            raise self._end(replica_id, batch, is_said=world.happens(0.5))
        if world.happens(world.fails):
            raise ArithmeticError("a call that failed by itself")
        if replica_id not in world.caches:  # meanwhile
            raise self._end(replica_id, batch, is_said=False)
        results = tuple(self._verify(world.caches[replica_id], request) for request in batch)
        try:
            await world.pass_time()
        except asyncio.CancelledError:  # as every client does
            self.release(replica_id, [request.seq_id for request in batch])
            raise
        return make_reply(replica_id, results)

    def _end(
        self, replica_id: str, batch: Sequence[VerifyRequest], *, is_said: bool
    ) -> WorkerLostError:
        if self.world.caches.pop(replica_id, None) is not None:
            self.world.start_replica()
        for request in batch:
            seq_id = request.seq_id
            self.world.num_losses[seq_id] = self.world.num_losses.get(seq_id, 0) + 1
            most = max(self.world.most_losses.get(seq_id, 0), self.world.num_losses[seq_id])
            self.world.most_losses[seq_id] = most
        return WorkerFailedError("a step failed") if is_said else WorkerLostError("it is gone")

    def _verify(self, cache: dict[str, int], request: VerifyRequest) -> VerifyResult:
        seq_id, cached_len = request.seq_id, cache.get(request.seq_id, 0)
        assert request.new_tokens
        if request.base_len > cached_len:
            return VerifyResult(seq_id=seq_id, needs_tokens_from=cached_len)
        if self.world.happens(0.05):
            cache.pop(seq_id, None)
            return VerifyResult(seq_id=seq_id, needs_tokens_from=0)
        length = request.base_len + len(request.new_tokens)
        drafts = request.draft_tokens[: self.world.rng.choice([1, 4, 100])]
        own = [token_at(request.seed, length + index) for index in range(len(drafts) + 1)]
        verdict = accept_matching(drafts, own)
        cache[seq_id] = length + verdict.num_accepted
        self.world.num_losses[seq_id] = 0
        return VerifyResult(
            seq_id=seq_id,
            tokens=verdict.tokens,
            num_accepted=verdict.num_accepted,
            num_tested=verdict.num_tested,
        )


class Drafters:
    """A drafter that is right at times, raises, is lost, lies, or answers what nobody asked."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.held: set[str] = set()

    async def find(self) -> str:
        return "drafter"

    def release(self, replica_id: str, seq_ids: Sequence[str]) -> None:  # noqa: ARG002
        self.held.difference_update(seq_ids)

    async def call(
        self,
        replica_id: str | None,  # noqa: ARG002
        batch: Sequence[ProposeRequest],
        *,
        timeout_s: float,  # noqa: ARG002
    ) -> Reply[ProposeResult]:
        world = self.world
        await world.pass_time()
        if world.happens(world.drafter_raises):
            raise world.rng.choice([ValueError, IndexError, WorkerLostError])("a drafter")
        self.held.update(request.seq_id for request in batch)
        results = tuple(self._propose(request) for request in batch)
        try:
            await world.pass_time()
        except asyncio.CancelledError:  # as every client does
            self.release("drafter", [request.seq_id for request in batch])
            raise
        if world.happens(world.drafter_lies / 4):
            results = results[1:]
        return make_reply("drafter", results)

    def _propose(self, request: ProposeRequest) -> ProposeResult:
        world, seq_id = self.world, request.seq_id
        if world.happens(world.drafter_lies):
            lies: list[dict[str, Any]] = [
                {"needs_tokens_from": world.rng.randrange(-5, 500)},
                {"error": "cannot"},
                {"is_released": True},
                {"draft_tokens": (1,) * 90, "confidences": (float("nan"),) * 90},
                {"draft_tokens": (-1, 10**9), "confidences": (0.5,)},
            ]
            return ProposeResult(seq_id=seq_id, **world.rng.choice(lies))
        first = request.base_len + len(request.new_tokens) + len(request.assumed_tokens)
        tokens = tuple(
            token_at(request.seed, first + index) ^ int(world.happens(0.2))
            for index in range(world.rng.randrange(request.k + 1))
        )
        return ProposeResult(seq_id=seq_id, draft_tokens=tokens, confidences=(0.7,) * len(tokens))


def make_reply(replica_id: str, results: tuple[Any, ...]) -> Reply[Any]:
    return Reply(
        replica_id=replica_id,
        compute_s=0.0,
        num_steps=1,
        num_tokens=1,
        num_prefill_tokens=0,
        results=results,
    )


class Policy(FixedGamma):
    """A fixed length that raises at random, whatever it is asked."""

    def __init__(self, world: World) -> None:
        super().__init__(world.rng.choice([0, 1, 4, 8]))
        self._world = world
        for method in ("choose", "select", "observe", "forget"):
            setattr(self, method, self._at_risk(getattr(self, method)))

    def _at_risk(self, method: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            if self._world.happens(self._world.policy_raises):
                raise ZeroDivisionError("a policy")
            return method(*arguments, **more)

        return call


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


class RaisingLookup(PromptLookup):
    """Prompt lookup that raises at random, and lies."""

    def __init__(self, world: World, **options: Any) -> None:
        super().__init__(**options)
        self._world = world

    def draft(self, sequence: LiveSequence, max_tokens: int) -> DraftTokens:
        world = self._world
        if world.happens(world.drafter_raises / 4):
            raise LookupError("a drafter")
        drafts = super().draft(sequence, max_tokens)
        if world.happens(world.drafter_lies / 4):
            return DraftTokens(tokens=(-1, 10**9) * 50, confidences=(float("nan"),))
        return drafts


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
