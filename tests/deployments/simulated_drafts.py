"""Drafts whose chances are known, and what becomes of them."""

import random
from collections.abc import Callable, Sequence

from deployments.router.policy.gamma import Outcome

DRAFTER_BETA = 0.35
"""The exponent of the simulated drafter: it is accepted more often than its confidence says."""


def judge(
    rng: random.Random,
    seq_id: str,
    chances: Sequence[float],
    *,
    confidences: Sequence[float] = (),
    is_sampled: bool = False,
    source: str = "model",
) -> Outcome:
    """What becomes of drafts that are accepted with these probabilities."""
    num_accepted = 0
    while num_accepted < len(chances) and rng.random() < chances[num_accepted]:
        num_accepted += 1
    return Outcome(
        seq_id=seq_id,
        num_draft_tokens=len(chances),
        num_tested=min(num_accepted + 1, len(chances)),
        num_accepted=num_accepted,
        num_committed=num_accepted + 1,
        confidences=tuple(confidences),
        is_sampled=is_sampled,
        source=source,
    )


def draw(rng: random.Random, seq_id: str, num_drafts: int, alpha: float) -> Outcome:
    """What becomes of drafts that are each accepted with probability alpha."""
    return judge(rng, seq_id, [alpha] * num_drafts)


def confidence(chance: float, beta: float = DRAFTER_BETA) -> float:
    """That a drafter states of a token with this chance."""
    return chance ** (1 / beta)


Chance = Callable[[random.Random, float], float]


def even(_: random.Random, alpha: float) -> float:
    """Every token is as good as the others."""
    return alpha


def varied(rng: random.Random, alpha: float) -> float:
    """Many tokens are sure or hopeless; on average they are accepted with probability alpha."""
    return rng.betavariate(1.2 * alpha, 1.2 * (1 - alpha))
