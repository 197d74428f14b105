"""Simulated machines: what rounds take, what workers measure of themselves, and whole runs."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, count
from operator import mul

from deployments.router.policy.controller import DynamicGamma
from deployments.router.policy.gamma import (
    Candidate,
    Decision,
    Drafted,
    GammaController,
    ObservedRound,
    Outcome,
)
from tests.deployments.simulated_drafts import Chance, confidence, even, judge
from workers.types import StepTime

Sureness = Callable[[int, float], float]
"""What a drafter says of a draft of the i-th sequence with this chance."""


MAX_GAMMA = 8
FIXED = (0, 1, 2, 4, 6, 8)
"""What a dynamic gamma is compared with."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Milliseconds of a round: drafting to a depth, verifying a number of tokens."""

    hop: float
    """What a call to the drafter takes beside its steps."""
    draft_step: float
    verify: float
    verify_token: float
    verify_wide: float = 0.0
    """More than 8 tokens cost this much more, as with matrix kernels that work in blocks."""
    verify_hop: float = 0.0
    """What a call to the target takes beside its step."""
    plain_more: float = 0.0
    """A round without drafts costs this much more, as texts are handed out during its step."""
    router: float = 0.0
    """What the router does between a round's calls and before the next round."""

    def step_s(self, num_tokens: float) -> float:
        """Seconds of a step of the target."""
        is_wide = num_tokens > 8
        return (self.verify + self.verify_token * num_tokens + self.verify_wide * is_wide) / 1e3

    def round_s(self, longest: int, num_tokens: float) -> tuple[float, float]:
        """Seconds of drafting and of verifying."""
        more_s = 0.0 if longest else self.plain_more / 1e3
        draft_s = (self.hop + self.draft_step * longest) / 1e3 if longest else 0.0
        return draft_s, self.verify_hop / 1e3 + self.step_s(num_tokens) + more_s

    def draft_hop_share(self, longest: float) -> float:
        """The part of the last round's drafting time that was the hop, where that many drafts were
        made; asked before `is_clean`."""
        return self.hop / (self.hop + self.draft_step * longest)

    def is_clean(self, longest: int) -> bool:
        """Whether the drafters of the last round did nothing else; asked once."""
        del longest
        return True

    def tokens_per_s(self, gamma: int, alphas: Sequence[float], *, num_beside: float = 0) -> float:
        """To be expected of rounds in which every sequence has that many drafts, all of them
        verified: what runs with a fixed gamma come to, however sure a drafter is of its drafts."""
        num_tokens = num_beside + len(alphas) * (gamma + 1)
        num_committed = sum(alpha**i for alpha in alphas for i in range(gamma + 1))
        return num_committed / self.expected_s(gamma, num_tokens)

    def expected_s(self, longest: int, num_tokens: float) -> float:
        """Seconds of a round in the mean."""
        return sum(self.round_s(longest, num_tokens)) + self.router / 1e3

    def measured(self, *, most: int = 512) -> dict[str, list[StepTime]]:
        """The tables that the workers measure when they start, whose steps hold `most` tokens.

        They are a sixth too low, as nothing else runs then, and off by up to 3 % anywhere."""
        rng = random.Random(0)

        def time(num_sequences: int, num_tokens: int, true_s: float) -> StepTime:
            seconds = true_s / 1.2 * rng.uniform(0.97, 1.03)
            return StepTime(num_sequences=num_sequences, num_tokens=num_tokens, seconds=seconds)

        sizes = (1, 4, 16, 64)
        amounts = (1, 2, 4, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512)
        return {
            "target_steps": [
                time(n, t, self.step_s(t)) for n in sizes for t in amounts if n <= t <= most
            ],
            "draft_steps": [time(n, n, self.draft_step / 1e3) for n in sizes],
        }

    def controller(self) -> DynamicGamma:
        """A new one for this machine."""
        return DynamicGamma(**self.measured())


class Graphed(Machine):
    """A GPU: memory limits steps of up to 64 tokens, and a step is padded to the next graph."""

    def step_s(self, num_tokens: float) -> float:
        padded = 2 ** math.ceil(math.log2(num_tokens))
        return super().step_s(max(0, padded - 64))


@dataclass(frozen=True, kw_only=True)
class StalledAtFirst(Machine):
    """Its first rounds with or without drafts take six times as long, as in a process that has just
    started."""

    are_drafted: bool
    stalls: list[None]
    """One entry for each stalled round that is still to come."""

    @classmethod
    def like(
        cls, machine: Machine, *, num_stalls: int = 2, are_drafted: bool = False
    ) -> "StalledAtFirst":
        return cls(**asdict(machine), stalls=[None] * num_stalls, are_drafted=are_drafted)

    def round_s(self, longest: int, num_tokens: float) -> tuple[float, float]:
        draft_s, verify_s = super().round_s(longest, num_tokens)
        if self.stalls and self.are_drafted == (longest > 0):
            self.stalls.pop()
            return 6.0 * draft_s, 6.0 * verify_s
        return draft_s, verify_s


@dataclass(frozen=True, kw_only=True)
class Stalling(Machine):
    """Other processes take its cores now and then, for longer than a step takes."""

    stall: float = 8.0
    every: int = 9
    """One in so many calls of a worker meets a stall."""
    _calls: Iterator[int] = field(default_factory=count)

    @classmethod
    def like(cls, machine: Machine) -> "Stalling":
        return cls(**asdict(machine))

    def round_s(self, longest: int, num_tokens: float) -> tuple[float, float]:
        draft_s, verify_s = super().round_s(longest, num_tokens)
        return draft_s + (self._stall_s() if longest else 0.0), verify_s + self._stall_s()

    def _stall_s(self) -> float:
        return 0.0 if next(self._calls) % self.every else self.stall / 1e3

    def expected_s(self, longest: int, num_tokens: float) -> float:
        num_calls = 1 + (longest > 0)
        undisturbed_s = sum(super().round_s(longest, num_tokens)) + self.router / 1e3
        return undisturbed_s + num_calls * self.stall / 1e3 / self.every


@dataclass(frozen=True, kw_only=True)
class Reading(Machine):
    """Its drafters first read what was written without them."""

    num_drafts: int = 7
    """As many drafts take as long as reading does after many rounds."""
    _unread: list[None] = field(default_factory=list)
    """One entry for each round since there were drafts."""

    @classmethod
    def like(cls, machine: Machine, **more: int) -> "Reading":
        return cls(**asdict(machine), **more)

    def round_s(self, longest: int, num_tokens: float) -> tuple[float, float]:
        draft_s, verify_s = super().round_s(longest, num_tokens)
        if longest:
            draft_s += self.draft_step / 1e3 * self._num_read
        return draft_s, verify_s

    @property
    def _num_read(self) -> float:
        """As many drafts take as long as reading what is unread."""
        return self.num_drafts * min(1.0, len(self._unread) / 50)

    def draft_hop_share(self, longest: float) -> float:
        return super().draft_hop_share(longest + self._num_read)

    def is_clean(self, longest: int) -> bool:
        is_clean = len(self._unread) <= longest
        self._unread[:] = [] if longest else [*self._unread, None]
        return is_clean


# one stream on a CPU, a GPU with a slow network, a machine whose batch is full already
CPU = Machine(hop=4, draft_step=1.5, verify=38, verify_token=1)
REMOTE = Machine(hop=8, draft_step=1, verify=25, verify_token=0.05)
FULL = Machine(hop=4, draft_step=1.5, verify=10, verify_token=8)
BLOCKS = Machine(hop=5, draft_step=2, verify=46, verify_token=0.8, verify_wide=14)
GPU = Graphed(hop=0.3, verify_hop=0.3, draft_step=0.8, verify=9, verify_token=0.06)
NODES = Machine(hop=2, verify_hop=2, draft_step=1.2, verify=20, verify_token=0.3)
# so small a model that it shows when texts are handed out
SMALL = Machine(hop=1.2, draft_step=0.3, verify=1.4, verify_token=0.02, plain_more=0.7)
# the 287M target of docs/ on two cores
WIDE = Machine(hop=2, draft_step=0.55, verify=14, verify_token=0.7)
# a call to the drafter takes longer than a step of the target, so one draft never pays
DISTANT = Machine(hop=30, draft_step=1, verify=25, verify_token=0.05)
MACHINES = {
    "cpu": CPU, "remote": REMOTE, "full": FULL, "blocks": BLOCKS, "gpu": GPU, "nodes": NODES
}  # fmt: skip


@dataclass
class Run:
    tokens: list[float] = field(default_factory=list)
    """To be expected of each round, so that luck does not count."""
    times_s: list[float] = field(default_factory=list)
    gammas: list[list[int]] = field(default_factory=list)

    def tokens_per_s(self, start: int = 0, end: int | None = None) -> float:
        """Tokens per second of the rounds from `start` to `end`."""
        return sum(self.tokens[start:end]) / sum(self.times_s[start:end])


def simulate(
    controller: GammaController,
    machine: Machine,
    alphas: Callable[[int], Sequence[float]],
    num_rounds: int,
    *,
    seed: int = 0,
    chance: Chance | None = None,
    beside: Callable[[Run], int] = lambda _: 0,
    max_gamma: int = MAX_GAMMA,
    is_sampled: Callable[[int], bool] = lambda _: False,
) -> Run:
    """`alphas(round)` are those of the sequences of a round; noise of 10 % on every time.

    After the rounds so far, `beside(run)` tokens of others are run in the same step.

    With a `chance`, drafts have one each, and the drafter says how sure it is; without, it is
    silent, and drafts as far as it is asked to. Of sampled tokens, those of a sequence `i` with
    `is_sampled(i)`, it is surer than it should be.
    """

    def sureness(i: int, chance: float) -> float:
        return confidence(chance, 1.5) if is_sampled(i) else confidence(chance)

    rng = random.Random(seed)
    run = Run()
    observed: ObservedRound | None = None
    for index in range(num_rounds):
        of_round = alphas(index)
        candidates = [
            Candidate(seq_id=str(i), max_gamma=max_gamma, is_sampled=is_sampled(i))
            for i in range(len(of_round))
        ]
        num_beside = beside(run)
        decision = controller.choose(candidates, num_prefill_tokens=num_beside)
        sure = sureness if chance else None
        chances, drafted = draw_drafts(
            rng, candidates, decision, of_round.__getitem__, chance, sure
        )
        kept = controller.select(decision, drafted)
        if observed is not None:  # told late, when the next round is under way
            controller.observe(observed)
        outcomes = judge_all(rng, drafted, kept, chances)
        num_own = len(of_round) + sum(kept)
        longest = max(map(len, chances.values()), default=0)
        draft_s, verify_s = machine.round_s(longest, num_beside + num_own)
        observed = observe(
            machine, decision, outcomes, num_sequences=len(of_round), longest=longest,
            num_drafted=len(drafted), num_own=num_own, num_beside=num_beside,
            draft_s=draft_s * rng.uniform(0.9, 1.1), verify_s=verify_s * rng.uniform(0.9, 1.1),
        )  # fmt: skip
        run.tokens.append(
            len(of_round)
            + sum(
                sum(accumulate(chances[outcome.seq_id][: outcome.num_draft_tokens], mul))
                for outcome in outcomes
            )
        )
        run.times_s.append(observed.round_s)
        by_sequence = {int(outcome.seq_id): outcome.num_draft_tokens for outcome in outcomes}
        run.gammas.append([by_sequence.get(i, 0) for i in range(len(of_round))])
    return run


def draw_drafts(
    rng: random.Random,
    candidates: Sequence[Candidate],
    decision: Decision,
    alpha: Callable[[int], float],
    chance: Chance | None,
    sureness: Sureness | None,
) -> tuple[dict[str, list[float]], list[Drafted]]:
    """The chances of the drafts of each sequence that drafts any, and what the controller is told
    of these drafts; drafters stop as they may."""
    chances: dict[str, list[float]] = {}
    drafted = []
    plan = zip(candidates, decision.gammas, decision.stop_below, strict=True)
    for i, (candidate, gamma, stop_below) in enumerate(plan):
        drafts, confidences, product = list[float](), list[float](), 1.0
        while len(drafts) < gamma and product >= stop_below:
            drafts.append((chance or even)(rng, alpha(i)))
            if sureness:
                confidences.append(sureness(i, drafts[-1]))
                product *= confidences[-1]
        if drafts:
            chances[candidate.seq_id] = drafts
            drafted.append(
                Drafted(
                    seq_id=candidate.seq_id,
                    num_draft_tokens=len(drafts),
                    confidences=tuple(confidences),
                    is_sampled=candidate.is_sampled,
                )
            )
    return chances, drafted


def judge_all(
    rng: random.Random,
    drafted: Sequence[Drafted],
    kept: Sequence[int],
    chances: dict[str, list[float]],
) -> tuple[Outcome, ...]:
    """What becomes of the drafts that are verified."""
    return tuple(
        judge(
            rng,
            draft.seq_id,
            chances[draft.seq_id][:num_kept],
            confidences=draft.confidences[:num_kept],
            is_sampled=draft.is_sampled,
        )
        for draft, num_kept in zip(drafted, kept, strict=True)
        if num_kept > 0
    )


def observe(
    machine: Machine,
    decision: Decision,
    outcomes: tuple[Outcome, ...],
    *,
    num_sequences: int,
    num_drafted: int,
    longest: int,
    num_own: int,
    num_beside: int,
    draft_s: float,
    verify_s: float,
) -> ObservedRound:
    """What the controller is told of a round that took so long."""
    draft_hop_s = draft_s * machine.draft_hop_share(longest)
    verify_hop_s = machine.verify_hop / 1e3
    return ObservedRound(
        reason=decision.reason,
        outcomes=outcomes,
        num_sequences=num_sequences,
        num_drafted=num_drafted,
        longest_draft=longest,
        num_tokens=num_own + num_beside,
        num_committed=num_sequences + sum(outcome.num_accepted for outcome in outcomes),
        draft_s=draft_s if machine.is_clean(longest) else None,
        draft_compute_s=draft_s - draft_hop_s,
        verify_s=None if num_beside else verify_s,
        verify_compute_s=verify_s - verify_hop_s,
        round_s=draft_s + verify_s + machine.router / 1e3,
        router_s=machine.router / 1e3,
    )
