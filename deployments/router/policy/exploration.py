"""Rounds that do not seem the best, made now and then to see what they would bring by now.

Nothing is learnt of drafts while none are made, nor of rounds without drafts while all have some.
So a share of the time is put by, and spent on the other kind of round whenever it holds what that
is expected to lose. What it loses in truth is then taken off: where drafts have become good again,
they lose nothing, and one try follows another at once.
"""

import math

from deployments.router.policy.gamma import ObservedRound, Reason
from deployments.router.policy.planner import Plan

EXPLORE_SHARE = 0.01
"""The share of the time of plain rounds that exploring may lose."""


class Exploration:
    """The time that has been put by."""

    def __init__(self) -> None:
        self._saved_s = math.inf  # enough for one try at once

    def begins(self, plan: Plan) -> bool:
        """Put by a share of a round's time, and pay for a try from it if there is enough."""
        pays = plan.loss_s < 0.0
        loss_s = plan.plain_s if pays else plan.loss_s
        self._saved_s = min(self._saved_s + EXPLORE_SHARE * plan.plain_s, max(plan.plain_s, loss_s))
        if self._saved_s < loss_s or not any(plan.gammas):
            return False
        self._saved_s -= plan.plain_s if pays else plan.time_s - plan.plain_s
        return True

    def observe(self, observed: ObservedRound, *, token_s: float) -> None:
        """Learn what a try has brought; a token takes `token_s` without drafts."""
        if observed.reason is Reason.EXPLORE:
            num_accepted = sum(outcome.num_accepted for outcome in observed.outcomes)
            self._saved_s += num_accepted * token_s
