"""What a round costs, and what rounds make of their time. Pure."""

import math
from dataclasses import dataclass, field

from deployments.router.cost import CostCurve

RECENT = 0.03
"""Of what is remembered of the rate, the share that a round replaces."""
SURPLUS_RATE = 1 / 64
"""Of what is remembered of a round's surplus, the share that a round replaces."""
SURPLUS_PRIOR = 8
"""Rounds that the guess weighs, that there is none."""
LONGEST_ROUND = 3.0
"""Times what is expected: what takes longer met a pause that is no property of such rounds."""
NUM_TEXTS = 32
"""Of the last ones, what says how much prompts leave as a rule."""


@dataclass(slots=True)
class SizedCost:
    """A curve for one sequence at a time, for two or three, four to seven, and so on: handing out
    the texts of many takes the processor from what comes next."""

    relative_slope: float
    """See CostCurve."""
    _curves: dict[int, CostCurve] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        return bool(self._curves)

    def of(self, num_sequences: int) -> CostCurve:
        """What is known of as many sequences, or of the nearest number that was seen."""
        size = num_sequences.bit_length()
        nearest = min(self._curves, key=lambda known: abs(known - size))
        return self._curves[nearest]

    def observe(self, num_sequences: int, amount: int, cost_s: float) -> None:
        size = num_sequences.bit_length()
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
class Surplus:
    """What rounds take beyond what their draft and their step take as a rule, in the mean, where
    something is drafted and where nothing is; for each size, see SizedCost.

    Pauses of a machine are most of it where rounds are short. And the last round's texts are handed
    out during whatever comes next, a draft or else a step, which takes the processor from it.
    """

    _means_s: dict[tuple[int, bool], float] = field(default_factory=dict)
    _num_seen: dict[tuple[int, bool], int] = field(default_factory=dict)

    def of(self, num_sequences: int, *, is_drafted: bool) -> float:
        """Seconds; less than 0 if they are shorter. 0 while both are not known."""
        size = num_sequences.bit_length()
        if (size, not is_drafted) not in self._means_s:
            return 0.0
        return self._means_s.get((size, is_drafted), 0.0)

    def observe(
        self, num_sequences: int, time_s: float, expected_s: float, *, is_drafted: bool
    ) -> None:
        key = num_sequences.bit_length(), is_drafted
        beyond_s = min(time_s, LONGEST_ROUND * expected_s) - expected_s
        num_seen = self._num_seen[key] = self._num_seen.get(key, 0) + 1
        rate = max(SURPLUS_RATE, 1.0 / (num_seen + SURPLUS_PRIOR))
        mean_s = self._means_s.get(key, 0.0)
        self._means_s[key] = mean_s + rate * (beyond_s - mean_s)


@dataclass(slots=True)
class RoundCost:
    """A round drafts up to its longest draft, then verifies all its tokens."""

    draft: SizedCost = field(default_factory=draft_cost)
    verify: SizedCost = field(default_factory=verify_cost)
    surplus: Surplus = field(default_factory=Surplus)

    @property
    def is_known(self) -> bool:
        return self.draft.is_known and self.verify.is_known
