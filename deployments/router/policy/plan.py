"""How many drafts are worth their place in a round. Pure.

A round is to bring the most expected tokens per second over the whole batch,

    sum_i (1 + sum_{j <= k_i} P(the first j drafts of i are accepted)) / (draft(max k) + verify(n)),

where n counts the tokens of the target's step. For a given longest draft, verifying costs the same
for every token, so tokens are taken by their probability of being accepted, down to the threshold
that gives the best rate: a step in the costs may hide behind one that does not pay. Drafters stop
below that threshold too, so a step of theirs costs time only while any sequence is above it.

A round that runs others' prompts too is slow whatever is drafted, and by its own rate every draft
would seem worth its time. But prompts have to be run at some time, so what a draft saves is a round
of these sequences alone, later; time is worth what they would make of it then, however many prompts
there are. Beside a long prompt that would be hard on them: round after round brings them hardly
more than a token each. So where prompts leave them far less than they leave to texts as a rule,
time is worth no more than what rounds made of it of late, and drafts are cheap. Where all texts
have long prompts it is not: cheap drafts would hold up the prompts of the next ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deployments.router.policy.cost import CostCurve, Floats
from deployments.router.policy.round_cost import RoundCost

NUM_THRESHOLDS = 24
"""Of those at which a draft may stop: more only take time."""
LEAST_SURVIVAL = 0.01
"""Drafts that survive with less probability bring too little to be worth the thought."""
FAIR_SHARE = 0.5
"""Of what prompts leave to texts as a rule. While they leave sequences that, drafts are no cheaper
beside a prompt; where they leave less, time is worth less by the square, down to the recent
rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to draft, before it is known how sure the drafter will be."""

    gammas: list[int]
    least_survival: float
    """A draft that survives with less probability is expected not to be worth its time, and those
    after it neither."""
    tokens_per_s: float
    """What time is worth: to expect of the round, unless it runs tokens of others too."""
    alone_tokens_per_s: float
    """To expect of such rounds that run no tokens of others."""
    loss: float = 0.0
    """Where nothing is drafted, what drafts would lose at least, of the tokens of such a round."""


def best_plan(
    survival: Floats,
    cost: RoundCost,
    *,
    num_beside: int,
    recent_rate: float = math.inf,
    usual_share: float = 1.0,
    must_draft: bool = False,
) -> Plan:
    """The plan that makes the most of its time.

    `num_beside` tokens of others are run in the same step. What rounds made of their time of late,
    `recent_rate`, in tokens per second, says how much such tokens leave to these sequences;
    `usual_share`, how much they leave to texts as a rule. If it `must_draft`, it is the plan that
    loses the least by that.

    Shapes: survival [sequences, samples, depth], the probability that the first 1, 2, ... drafts of
    a sequence are accepted, in equally likely cases; 0 where no draft may be.
    """
    num_sequences, num_samples, _ = survival.shape
    verify = cost.verify.of(num_sequences)
    plain_rate = num_sequences / cost.plain_s(num_sequences)
    thresholds = _thresholds(survival)
    if not len(thresholds):
        return _plain(num_sequences, plain_rate, alone=plain_rate, loss=1.0)
    is_worth = survival >= thresholds[:, None, None, None]
    shares = np.count_nonzero(is_worth, axis=2) / num_samples  # [thresholds, sequences, depth]
    num_drafts = shares.sum(axis=1).cumsum(axis=1)  # [thresholds, longest]
    chances = np.einsum("tisd,isd->td", is_worth, survival / num_samples)
    expected = num_sequences + chances.cumsum(axis=1)  # likewise
    draft_s = _draft_s(shares, cost)

    def times_s(num_others: int) -> Floats:
        verify_s: Floats = verify.at(num_sequences + num_others + num_drafts)
        return draft_s + verify_s

    alone = max(plain_rate, float((expected / times_s(0)).max()))
    rate = _rate_beside(alone, recent_rate, usual_share) if num_beside else alone
    gains = expected - rate * times_s(num_beside)
    best, last = np.unravel_index(gains.argmax(), gains.shape)
    plain_gain = num_sequences - rate * cost.plain_s(num_sequences, num_beside)
    if gains[best, last] <= plain_gain and not must_draft:
        loss = float(plain_gain - gains[best, last]) / num_sequences
        return _plain(num_sequences, rate, alone=alone, loss=loss)
    is_drafted = shares[best, :, : last + 1] > 0
    return Plan(
        gammas=is_drafted.sum(axis=1).tolist(),
        least_survival=float(thresholds[best]),
        tokens_per_s=rate,
        alone_tokens_per_s=alone,
    )


def _thresholds(survival: Floats) -> Floats:
    """Probabilities below which drafts may not be worth their place.  # [thresholds]"""
    chances = np.unique(survival[survival >= LEAST_SURVIVAL])
    if len(chances) <= NUM_THRESHOLDS:
        return chances
    chosen: Floats = chances[np.linspace(0, len(chances) - 1, NUM_THRESHOLDS).astype(int)]
    return chosen


def _draft_s(shares: Floats, cost: RoundCost) -> Floats:
    """What drafting takes if it ends at a longest draft, and for each sequence with the first draft
    below a threshold: a step of the drafter is run as long as any goes on.

    Shapes: shares [thresholds, sequences, depth] of cases that are worth it -> [thresholds, depth]
    """
    _, num_sequences, depth = shares.shape
    until_s = cost.draft.of(num_sequences).at(np.arange(1, depth + 1))
    chance_of_any = 1.0 - np.prod(1.0 - shares[:, :, :-1], axis=1)
    later_s = np.diff(until_s) * chance_of_any
    draft_s: Floats = until_s[0] + np.pad(later_s.cumsum(axis=1), ((0, 0), (1, 0)))
    return draft_s


def _rate_beside(alone: float, recent: float, usual_share: float) -> float:
    """What time is worth beside prompts, in tokens per second."""
    of_fair = recent / alone / (FAIR_SHARE * usual_share)
    return min(alone, max(recent, of_fair * of_fair * alone))


def _plain(num_sequences: int, tokens_per_s: float, *, alone: float, loss: float) -> Plan:
    return Plan(
        gammas=[0] * num_sequences,
        least_survival=1.0,
        tokens_per_s=tokens_per_s,
        alone_tokens_per_s=alone,
        loss=loss,
    )


def worth_verifying(
    survival: Sequence[Sequence[float]],
    verify: CostCurve,
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
    expected, most, num_worth = 0.0, 0.0, 0
    plain_s = verify(num_plain)
    for num_tokens, (probability, _, _) in enumerate(tokens, start=1):
        expected += probability
        gain = expected - tokens_per_s * (verify(num_plain + num_tokens) - plain_s)
        if gain > most:
            most, num_worth = gain, num_tokens
    kept = [0] * len(survival)
    for _, index, position in tokens[:num_worth]:
        kept[index] = max(kept[index], position + 1)
    return kept
