"""Rounds that do not seem the best, made now and then to see what they would bring by now.

Nothing is learnt of drafts while none are made, nor of rounds without drafts while all have some.
So a share of the time is put by, and spent on the other kind of round whenever it holds what that
may lose. What it did not lose in truth is put back: where the other kind has become as good, one
try follows another at once. So does one more if drafters had to read first what was written
without them, since that says little of what drafts take in a row. What the reading lost
beyond the price of a try is taken from the time that is put by, so that the next one comes later.

Nor is anything learnt of second drafts while each sequence has one. So as much time is put by for
those, and every try of drafts asks for two.
"""

import math

from deployments.router.policy.gamma import ObservedRound, Reason
from deployments.router.policy.planner import Plan

EXPLORE_SHARE = 0.01
"""The share of the time of plain rounds that exploring may lose."""

FREE_TRIES = 8
"""How many tries of drafts are made at first, as the first rounds of a process may be stalls."""


class Exploration:
    """The time that has been put by, and what is made of it."""

    def __init__(self) -> None:
        self._saved_s = math.inf
        """Seconds that have been put by; at first enough for one try at once."""
        self._num_free = FREE_TRIES
        """How many tries of drafts still cost nothing."""
        self._tried: Plan | None = None
        """The plan beside which the last try was made."""
        self._is_second = False
        """Whether the last try followed one that was unclear."""
        self._is_unclear = False
        """Whether the last try did not tell what drafts take, so that another one follows."""
        self._saved_for_depth_s = 0.0
        """Seconds that have been put by for second drafts."""

    def begins(self, plan: Plan) -> bool:
        """Put by a share of a round's time, and pay for a try from it if there is enough."""
        if not any(plan.gammas) or math.isinf(plan.time_s):  # there may be no drafts
            return False
        loss_s = plan.plain_s if plan.pays else plan.loss_s
        self._saved_s = min(self._saved_s + EXPLORE_SHARE * plan.plain_s, max(plan.plain_s, loss_s))
        is_free = self._num_free > 0 and not plan.pays
        if self._saved_s < loss_s and not (is_free or self._is_unclear):
            return False
        if is_free:
            self._num_free -= 1
        else:
            self._saved_s -= _price_s(plan)
        self._tried = plan
        self._is_second, self._is_unclear = self._is_unclear, False
        return True

    def goes_deeper(self, plan: Plan) -> bool:
        """Put by a share of a round's time, and pay for a second draft from it where one draft each
        seems the best: else nothing would be learnt of second ones."""
        if max(plan.gammas) != 1:
            return False
        self._saved_for_depth_s += EXPLORE_SHARE * plan.plain_s
        if self._saved_for_depth_s < plan.draft_s:  # another step takes no longer
            return False
        self._saved_for_depth_s = 0.0
        return True

    def observe(self, observed: ObservedRound) -> None:
        """Put back what a try did not lose, and take away what it lost while drafters read; what a
        stall lost beyond the price is let be."""
        if observed.reason is Reason.EXPLORE and self._tried is not None:
            is_clean = observed.longest_draft == 0 or observed.draft_s is not None
            self._is_unclear = not (is_clean or self._is_second)
            lost_s = observed.round_s - observed.num_committed / self._tried.tokens_per_s
            if not self._tried.pays:
                lost_s -= self._tried.plain_s - observed.num_sequences / self._tried.tokens_per_s
            read_s = 0.0 if is_clean else observed.draft_compute_s
            self._saved_s += max(-read_s, _price_s(self._tried) - lost_s)


def _price_s(plan: Plan) -> float:
    """Seconds that a try loses at most: its time beyond that of a plain round, or a plain round's
    where drafts pay."""
    return plan.plain_s if plan.pays else plan.time_s - plan.plain_s
