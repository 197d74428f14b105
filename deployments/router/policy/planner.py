"""How many drafts are worth their place in a round.

A round is to bring the most expected tokens per second over the whole batch,

    sum_i (1 + sum_{j <= k_i} S_i(j)) / (draft(max k) + verify(n + P + sum_i k_i)),

where S_i(j) is the probability that the first j drafts of sequence i are accepted, n the number of
sequences and P the tokens of prompts that wait. Verifying costs the same for every token, so tokens
are taken in order of survival, down to the threshold and up to the longest draft that make the best
rate: a jump in the costs may hide behind one that does not pay. Drafters stop below the threshold
too, so a step of theirs is only run while some sequence is above it.

Where prompts wait, drafts are priced at the rate that these sequences would reach without them: the
prompts must run anyway, so a long step does not make drafts cheap. While a drafter drafts, the
target runs a step of prompts, and the verification waits for its end. Without a drafter, and where
more prompts wait than fit into that step, they run beside the verification. Then they may take
1 + DELAY_SHARE times as long at most, since drafts delay their first tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from deployments.router.policy.gamma import Maker
from deployments.router.policy.latency import Floats, Latency

NUM_THRESHOLDS = 16
"""How many thresholds are compared; more only take time."""
DELAY_SHARE = 0.25
"""How much longer a token of a prompt may take because of the drafts beside it, as a share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The prompts that wait to be run beside a round."""

    num_tokens: int = 0
    """Tokens that wait, but not more than fit into a step."""
    most: float = 0.0
    """The tokens that fit into a step; drafts take the place of prompts."""

    @property
    def during_drafting(self) -> float:
        """How many are run while a drafter drafts: a step of nothing else."""
        return min(float(self.num_tokens), self.most)

    def in_step(self, num_own: ArrayLike, *, is_after_drafting: ArrayLike = False) -> Floats:
        """How many are run beside that many tokens of sequences and their drafts; those that have
        run during the drafting are no longer among them.

        Shapes: [any] -> [any]; `is_after_drafting` one for all or [any].
        """
        room = np.maximum(1.0, np.subtract(self.most, num_own))
        is_left = np.logical_not(is_after_drafting) | (self.num_tokens >= self.most)
        beside: Floats = np.minimum(float(self.num_tokens), room) * is_left
        return beside


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The best drafts of a round, and what becomes of the round with and without them.

    It is made before it is known how confident the drafter will be.
    """

    gammas: list[int]
    """The draft length of each sequence; all 0 where no draft may be."""
    least_survival: float = 1.0
    """Drafts that survive with less probability are not expected to be worth their time."""
    draft_s: float = 0.0
    """Seconds before the verification: of drafting, whoever does it, and of a step of prompts that
    takes longer than that."""
    is_after_drafting: bool = False
    """Whether a drafter is asked before the verification; see `Latency.verify_s`."""
    time_s: float
    """Seconds of the round with them."""
    num_more: float
    """Tokens that the drafts are expected to bring, beside those of a round without."""
    plain_s: float
    """Seconds of the round without drafts."""
    prompts: Prompts
    tokens_per_s: float
    """What a second is worth: the rate of rounds without prompts, drafted as well as can be."""

    @property
    def loss_s(self) -> float:
        """What the drafts lose, in seconds; below 0 if they are worth their time."""
        return self.time_s - self.plain_s - self.num_more / self.tokens_per_s

    @property
    def pays(self) -> bool:
        """Whether its drafts are worth their time."""
        return self.loss_s < 0.0


def best_plan(
    survival: Floats,
    makers: Sequence[Maker],
    latency: Latency,
    prompts: Prompts,
) -> Plan:
    """The drafts that make the most of their time, or lose the least.

    Where some drafts are in hand already, having others made may not pay.
    Shapes: survival [sequences, samples, depth], the probability that the first 1, 2, ... drafts
    are accepted, in equally likely cases; 0 where no draft may be.
    """
    plan = _plan(survival, makers, latency, prompts)
    is_free = np.array([maker is Maker.NOBODY for maker in makers])
    if is_free.all() or not is_free.any():
        return plan
    only_free = np.where(is_free[:, None, None], survival, 0.0)
    return max(plan, _plan(only_free, makers, latency, prompts), key=lambda plan: plan.tokens_per_s)


def _plan(
    survival: Floats,
    makers: Sequence[Maker],
    latency: Latency,
    prompts: Prompts,
) -> Plan:
    """The best plan with one threshold for all drafts; see `best_plan`."""
    num_sequences = len(survival)

    def plain_step_s(num_others: float) -> float:
        num_tokens = num_sequences + num_others
        return float(latency.verify_s(num_sequences, num_tokens, is_after_drafting=False))

    thresholds = _thresholds(survival)
    num_beside = float(prompts.in_step(num_sequences))
    alone_s, plain_s = plain_step_s(0), plain_step_s(num_beside)
    if not len(thresholds):
        return Plan(
            gammas=[0] * num_sequences, time_s=plain_s, num_more=0.0,
            plain_s=plain_s, prompts=prompts, tokens_per_s=num_sequences / alone_s,
        )  # fmt: skip
    is_taken = survival >= thresholds[:, None, None, None]
    shares = is_taken.mean(axis=2)  # [thresholds, sequences, depth]
    chances = np.where(is_taken, survival, 0.0).mean(axis=2).sum(axis=1)
    expected = num_sequences + chances.cumsum(axis=1)  # [thresholds, longest], as all below
    num_own = num_sequences + shares.sum(axis=1).cumsum(axis=1)
    draft_s = _making_s(shares, makers, Maker.DRAFTER, latency.draft_s)
    is_drafted = draft_s > 0.0
    made_s = draft_s + _making_s(shares, makers, Maker.TARGET, latency.ahead_s)

    def verify_s(num_others: Floats | float) -> Floats:
        return latency.verify_s(num_sequences, num_own + num_others, is_after_drafting=is_drafted)

    alone_times_s = made_s + verify_s(0.0)
    rate = max(num_sequences / alone_s, float((expected / alone_times_s).max()))
    all_s, is_allowed = alone_times_s, np.ones_like(expected, dtype=bool)
    if prompts.num_tokens:
        early_s = latency.prompts_s(prompts.during_drafting)
        made_s += is_drafted * np.maximum(0.0, early_s - draft_s)
        all_s = made_s + verify_s(np.where(is_drafted, 0.0, num_beside))
        beside = prompts.in_step(num_own, is_after_drafting=is_drafted)
        longest_s = _longest_s(prompts, beside, is_drafted, plain_s, num_sequences)
        is_allowed = made_s + verify_s(beside) <= longest_s
    gains = np.where(is_allowed, expected - rate * all_s, -math.inf)
    best, last = np.unravel_index(gains.argmax(), gains.shape)
    return Plan(
        gammas=np.count_nonzero(shares[best, :, : last + 1], axis=1).tolist(),
        least_survival=float(thresholds[best]),
        draft_s=float(made_s[best, last]),
        is_after_drafting=bool(draft_s[best, last] > 0.0),
        time_s=float(all_s[best, last]) if gains[best, last] > -math.inf else math.inf,
        num_more=float(expected[best, last]) - num_sequences,
        plain_s=plain_s,
        prompts=prompts,
        tokens_per_s=rate,
    )


def _longest_s(
    prompts: Prompts,
    beside: Floats,
    is_after_drafting: ArrayLike,
    plain_s: float,
    num_sequences: int,
) -> Floats:
    """How long a round may take that runs `beside` tokens of prompts with its verification, so that
    they get on at least 1 / (1 + DELAY_SHARE) as fast as in a plain round of `plain_s` seconds; any
    time where none are left to run then.

    Shapes: [any] -> [any].
    """
    num_run = beside + np.where(is_after_drafting, prompts.during_drafting, 0.0)
    longest_s = (1.0 + DELAY_SHARE) * plain_s * num_run / prompts.in_step(num_sequences)
    unheld: Floats = np.where(beside > 0.0, longest_s, math.inf)
    return unheld


def _thresholds(survival: Floats) -> Floats:
    """Probabilities below which drafts may not be worth their place.  # [thresholds]"""
    chances = np.unique(survival[survival > 0.0])
    if len(chances) <= NUM_THRESHOLDS:
        return chances
    chosen: Floats = chances[np.linspace(0, len(chances) - 1, NUM_THRESHOLDS).astype(int)]
    return chosen


def _making_s(
    shares: Floats,
    makers: Sequence[Maker],
    maker: Maker,
    seconds: Callable[[int, Floats], Floats],
) -> Floats:
    """Seconds of one maker's drafting, by the threshold at which it stops and by the longest draft.

    A sequence stops at its first draft below the threshold; a step is run as long as any of the
    maker's sequences goes on. `seconds` is how long so many steps for so many sequences take.
    Shapes: shares [thresholds, sequences, depth] of cases that are above -> [thresholds, depth]
    """
    own = [index for index, each in enumerate(makers) if each is maker]
    if not own:
        return np.zeros(shares.shape[::2])
    shares = shares[:, own]
    _, num_sequences, depth = shares.shape
    goes_on = 1.0 - np.prod(1.0 - shares[:, :, : depth - 1], axis=1)
    num_steps = np.ones(shares.shape[::2])
    num_steps[:, 1:] += goes_on.cumsum(axis=1)
    is_asked = shares[:, :, :1].any(axis=1)
    making_s: Floats = is_asked * seconds(num_sequences, num_steps)
    return making_s


def worth_verifying(survival: Sequence[Sequence[float]], plan: Plan, latency: Latency) -> list[int]:
    """How many drafts of each sequence to verify, now that they are made and known.

    A token is verified if it brings more than its time could bring otherwise, as long as prompts
    do not wait for too long.
    """
    lengths = [len(chances) for chances in survival]
    chances = np.array([chance for sequence in survival for chance in sequence])
    owners = np.repeat(np.arange(len(lengths)), lengths)
    order = np.argsort(-chances, kind="stable")  # earlier drafts of a sequence come first
    num_sequences, prompts, is_drafted = len(plan.gammas), plan.prompts, plan.is_after_drafting
    num_own = num_sequences + np.arange(len(chances) + 1.0)

    def verify_s(num_others: Floats | float) -> Floats:
        return latency.verify_s(num_sequences, num_own + num_others, is_after_drafting=is_drafted)

    cost_s = verify_s(float(prompts.in_step(num_sequences, is_after_drafting=is_drafted)))
    gains = np.append(0.0, chances[order].cumsum()) - plan.tokens_per_s * cost_s
    if prompts.num_tokens:
        beside = prompts.in_step(num_own, is_after_drafting=is_drafted)
        times_s = plan.draft_s + verify_s(beside)
        is_late = times_s > _longest_s(prompts, beside, is_drafted, plan.plain_s, num_sequences)
        gains[1:][is_late[1:]] = -math.inf
    num_worth = int(gains.argmax())
    kept: list[int] = np.bincount(owners[order[:num_worth]], minlength=len(lengths)).tolist()
    return kept
