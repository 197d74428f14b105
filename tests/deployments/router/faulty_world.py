"""Targets, drafters and policies that fail at random, each case by its seed."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.router.drafting.lookup import PromptLookup
from deployments.router.policy.gamma import FixedGamma
from deployments.router.sequence import Sequence as LiveSequence
from workers.errors import WorkerFailedError, WorkerLostError
from workers.types import (
    DraftTokens,
    ProposeRequest,
    ProposeResult,
    Reply,
    VerifyRequest,
    VerifyResult,
)
from workers.verification import accept_matching

NUM_TOKENS_OF_ALPHABET = 6
"""Few, so that wrong drafts are right at times."""
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
