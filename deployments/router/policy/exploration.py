"""Rounds that do not seem the best, made now and then to see what they would bring by now.

Nothing is learnt of drafts while none are made, nor of rounds without drafts while all have some.
So a share of the time is put by, and spent on the other kind of round whenever it holds what that
may lose. What it did not lose in truth is put back: where the other kind has become as good, one
try follows another at once.
"""

import math

from deployments.router.policy.gamma import ObservedRound, Reason
from deployments.router.policy.planner import Plan

EXPLORE_SHARE = 0.01
"""The share of the time of plain rounds that exploring may lose."""


class Exploration:
    """The time that has been put by, in seconds."""

    def __init__(self) -> None:
        self._saved_s = math.inf  # enough for one try at once
        self._tried: Plan | None = None
        """The plan beside which the last try was made."""

    def begins(self, plan: Plan) -> bool:
        """Put by a share of a round's time, and pay for a try from it if there is enough."""
        loss_s = plan.plain_s if plan.pays else plan.loss_s
        self._saved_s = min(self._saved_s + EXPLORE_SHARE * plan.plain_s, max(plan.plain_s, loss_s))
        if self._saved_s < loss_s or not any(plan.gammas):
            return False
        self._saved_s -= _price_s(plan)
        self._tried = plan
        return True

    def observe(self, observed: ObservedRound) -> None:
        """Put back what a try did not lose; what a stall lost beyond its price is let be."""
        if observed.reason is Reason.EXPLORE and self._tried is not None:
            lost_s = observed.round_s - observed.num_committed / self._tried.tokens_per_s
            self._saved_s += max(0.0, _price_s(self._tried) - lost_s)


def _price_s(plan: Plan) -> float:
    """Seconds that a try loses at most: its time beyond that of a plain round, or a plain round's
    where drafts pay."""
    return plan.plain_s if plan.pays else plan.time_s - plan.plain_s
