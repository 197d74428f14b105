"""When drafts are made although they do not seem to pay. Pure.

While nothing is drafted, nothing is learnt of what drafts cost or bring. A probe tells little: it
is one token of one sequence, by a drafter whose weights have left the processor's cache. So now and
then all sequences are drafted for a few rounds, as if that paid.
"""

from dataclasses import dataclass

LEAST_ROUNDS = 4
LEAST_DRAFTS = 12
"""A trial has at least so many rounds, and drafts of sequences."""
TRIAL_COST = 0.006
"""The share of time that may be spent on trials."""
FIRST_PAUSE, LAST_PAUSE = 96, 1024
"""Undrafted rounds before a trial, within which its cost decides; at least twice as many after each
that changed nothing."""


@dataclass(slots=True)
class Trials:
    loss: float = 1.0
    """What drafts would lose, of the tokens of a round; as was last thought."""
    _num_left: int = 0
    """Rounds of the trial under way."""
    _num_waited: int = 0
    """Undrafted rounds since the last."""
    _least_pause: int = FIRST_PAUSE

    def end(self) -> None:
        """Drafts pay."""
        self._num_left = self._num_waited = 0
        self._least_pause = FIRST_PAUSE

    def goes_on(self, *, is_ready: bool) -> bool:
        """Whether the coming round is one of the trial under way.

        `is_ready`: whether any drafter could draft; rounds in which they catch up do not count.
        """
        is_next = is_ready and self._num_left > 0
        self._num_left -= is_next
        return is_next

    def begins(self, num_sequences: int) -> bool:
        """Whether a trial begins with the coming round, which would else be undrafted."""
        if self._num_left:
            return False
        self._num_waited += 1
        num_rounds = max(LEAST_ROUNDS, LEAST_DRAFTS // max(1, num_sequences))
        pause = max(num_rounds * self.loss / TRIAL_COST, self._least_pause)
        if self._num_waited < min(pause, LAST_PAUSE):
            return False
        self._num_left, self._num_waited = num_rounds - 1, 0
        self._least_pause *= 2
        return True
