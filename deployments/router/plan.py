"""How many drafts are worth their place in a round. Pure.

A round is to bring the most expected tokens per second over the whole batch,

    sum_i (1 + sum_{j <= k_i} P(the first j drafts of i are accepted)) / (draft(max k) + verify(n)),

where n counts the tokens of the target's step. For a given longest draft, verifying costs the same
for every token, so tokens are taken by their probability of being accepted, as many as give the
best rate: a step in the costs may hide behind one that does not pay.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deployments.router.cost import Floats, RoundCost

MIN_SHARE = 0.1
"""Drafting goes as far as this share of the foreseen drafts is worth verifying."""
LEAST_SURVIVAL = 0.01
"""Drafts that survive with less probability bring too little to be worth the thought."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to draft, before it is known how sure the drafter will be."""

    gammas: list[int]
    least_survival: float
    """A draft that survives with less probability is expected not to be worth verifying."""
    tokens_per_s: float
    """To expect of the round."""


def best_plan(survival: Floats, cost: RoundCost, *, num_beside: int) -> Plan:
    """The plan of the most expected tokens per second.

    `num_beside` tokens of others are run in the same step. Where a long prompt makes it long, a few
    drafts more hardly matter; what they take from the prompt's share of the step, they are charged.

    Shapes: survival [sequences, samples, depth], the probability that the first 1, 2, ... drafts of
    a sequence are accepted, in equally likely cases; 0 where no draft may be.
    """
    num_sequences, num_samples, depth = survival.shape
    num_plain = num_sequences + num_beside
    plain_rate = num_sequences / cost.verify(num_plain)
    plain = Plan(gammas=[0] * num_sequences, least_survival=1.0, tokens_per_s=plain_rate)
    flat = survival.ravel()
    order = np.argsort(-flat, kind="stable")[: np.count_nonzero(flat >= LEAST_SURVIVAL)]
    if not len(order):
        return plain
    chances = flat[order]
    longest = np.arange(1, depth + 1)[:, None]
    is_drafted = order % depth < longest  # [longest, tokens], the likeliest token first
    num_drafts = np.cumsum(is_drafted, axis=1)
    expected = num_sequences + np.cumsum(is_drafted * chances, axis=1) / num_samples
    verify_s = cost.verify.at(num_plain + np.arange(len(order) + 1) / num_samples)
    rates = expected / (cost.draft.of(num_sequences).at(longest) + verify_s[num_drafts])
    best, last = np.unravel_index(rates.argmax(), rates.shape)
    if rates[best, last] <= plain_rate:
        return plain
    is_worth = (survival[:, :, : best + 1] >= chances[last]).mean(axis=1) >= MIN_SHARE
    return Plan(
        gammas=is_worth.sum(axis=1).tolist(),
        least_survival=float(chances[last]),
        tokens_per_s=float(rates[best, last]),
    )


def worth_verifying(
    survival: Sequence[Sequence[float]],
    cost: RoundCost,
    *,
    num_others: int,
    tokens_per_s: float,
) -> list[int]:
    """Of each sequence's drafts, how many to verify, now that they are known.

    Drafting is paid for; a token is verified if it brings more than its time could bring otherwise,
    at `tokens_per_s`. `num_others` tokens of the step are of others: of sequences without
    drafts, of prompts.
    """
    tokens = sorted(
        (
            (probability, index, position)
            for index, of_sequence in enumerate(survival)
            for position, probability in enumerate(of_sequence)
        ),
        key=lambda token: (-token[0], token[2]),
    )
    num_plain = num_others + len(survival)
    costs_s = cost.verify.at(num_plain + np.arange(len(tokens) + 1))
    expected = np.cumsum([0.0] + [probability for probability, _, _ in tokens])
    num_worth = int((expected - tokens_per_s * costs_s).argmax())
    kept = [0] * len(survival)
    for _, index, position in tokens[:num_worth]:
        kept[index] = max(kept[index], position + 1)
    return kept
