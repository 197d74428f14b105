"""What a round costs, and what rounds make of their time. Pure."""

import math
from dataclasses import dataclass, field

from deployments.router.cost import CostCurve

RECENT = 0.03
"""Of what is remembered of the rate, the share that a round replaces."""
NUM_TEXTS = 32
"""Of the last ones, what says how much prompts leave as a rule."""


@dataclass(slots=True)
class SizedCost:
    """A curve for one sequence at a time, for two, three to five, six to eleven, and so on: each
    twice the one before, give or take. Handing out the texts of many takes the processor from what
    comes next."""

    relative_slope: float
    """See CostCurve."""
    _curves: dict[int, CostCurve] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        return bool(self._curves)

    def of(self, num_sequences: int) -> CostCurve:
        """What is known of as many sequences, or of the nearest number that was seen."""
        size = _size(num_sequences)
        nearest = min(self._curves, key=lambda known: abs(known - size))
        return self._curves[nearest]

    def observe(self, num_sequences: int, amount: int, cost_s: float) -> None:
        size = _size(num_sequences)
        if size not in self._curves:
            is_first = not self._curves
            new = CostCurve(self.relative_slope) if is_first else self.of(num_sequences).as_guess()
            self._curves[size] = new
        self._curves[size].observe(amount, cost_s)


def draft_cost() -> SizedCost:
    """By the longest draft."""
    return SizedCost(relative_slope=0.2)


def verify_cost() -> SizedCost:
    """By the tokens that the target runs, drafts included."""
    return SizedCost(relative_slope=0.02)


@dataclass(slots=True)
class RecentRate:
    """What rounds made of their time of late, prompts beside them or not."""

    _num_tokens: float = 0.0
    _time_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Without bound while nothing is known."""
        return self._num_tokens / self._time_s if self._time_s else math.inf

    def observe(self, num_tokens: int, time_s: float) -> None:
        self._num_tokens += num_tokens - RECENT * self._num_tokens
        self._time_s += time_s - RECENT * self._time_s


@dataclass(slots=True)
class UsualShare:
    """What prompts leave to texts as a rule, of what rounds would make without them: the mean of
    the last texts, each told at its end. A prompt of any length is one text's."""

    share: float = 1.0
    _num_texts: int = 1
    """The first as if no prompt had been beside it."""

    def observe(self, share: float) -> None:
        self._num_texts = min(self._num_texts + 1, NUM_TEXTS)
        self.share += (min(share, 1.0) - self.share) / self._num_texts


@dataclass(slots=True)
class RoundCost:
    """A round drafts up to its longest draft, then verifies all its tokens."""

    draft: SizedCost = field(default_factory=draft_cost)
    verify: SizedCost = field(default_factory=verify_cost)

    @property
    def is_known(self) -> bool:
        return self.draft.is_known and self.verify.is_known


def _size(num_sequences: int) -> int:
    # the nearest power of two: while one of eight sequences ends, seven are known by the same curve
    return round(math.log2(max(1, num_sequences)))
