"""Whole runs on simulated machines."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from deployments.router.policy.gamma import (
    Candidate,
    Decision,
    Drafted,
    GammaController,
    ObservedRound,
    Outcome,
)
from tests.deployments.router.policy.machines import MAX_GAMMA, Machine
from tests.deployments.simulated_drafts import Chance, confidence, even, judge

Sureness = Callable[[int, float], float]
"""What a drafter says of a draft of the i-th sequence with this chance."""


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

    After the rounds so far, `beside(run)` tokens of prompts wait: they run while a drafter drafts,
    or else beside the verification.

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
        draft_s, verify_s = machine.round_s(longest, num_own + (0 if longest else num_beside))
        if longest:
            verify_s += machine.wait_s(num_beside, draft_s)
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
    hop_share, further_share = machine.draft_shares(longest)
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
        draft_compute_s=draft_s * (1.0 - hop_share),
        draft_further_s=draft_s * further_share,
        verify_s=None if num_beside else verify_s,
        verify_compute_s=verify_s - verify_hop_s,
        round_s=draft_s + verify_s + machine.router / 1e3,
        router_s=machine.router / 1e3,
    )
