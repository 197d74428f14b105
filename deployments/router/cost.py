"""What a round costs, learnt from the rounds that were. Pure."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

KNOTS: tuple[int, ...] = (
    *range(1, 17),
    *range(20, 65, 4),
    80,
    96,
    112,
    128,
    160,
    192,
    256,
    512,
    1024,
    4096,
)
LOCAL_RATE = 0.03
"""Of an error, the share that a knot takes over once it has been seen often."""
COMMON_RATE = 0.15
"""The share that all knots take over: the machine has become faster or slower as a whole."""
WELL_KNOWN = 5.0
"""Observations of a knot after which its errors say something of the others."""
LONGEST_PAUSE = 0.3
"""Of the expected cost: what exceeds it by more is taken for a pause of the machine, no property of
the amount."""
DOUBTED = 0.15
"""Where nothing was seen yet, a cost that exceeds the expected by more may be a pause too. Of the
first two, the lesser is believed: a cost that is taken to be high is not soon tried again."""


@dataclass(slots=True)
class _Knot:
    amount: int
    cost_s: float
    num_seen: float = 0.0
    """Observations here; one between two knots counts for both in part."""
    doubted_s: float | None = None
    """By how much the first one was more than expected, if that was much."""

    def believe(self, error: float, expected_s: float) -> float | None:
        """What to learn from an error; None if it is too early to say."""
        if self.num_seen:
            return min(error, LONGEST_PAUSE * expected_s)
        if error <= DOUBTED * expected_s:
            return error
        if self.doubted_s is None:
            self.doubted_s = error
            return None
        return min(error, self.doubted_s)


@dataclass(slots=True)
class CostCurve:
    """Seconds by amount: straight between knots, and never falling.

    One straight line would not do, since steps cost by steps: matrix kernels work in blocks of
    eight, and what memory limits is limited by arithmetic beyond some batch. Outside the amounts
    that were seen, the guess is that one more unit adds `relative_slope` of the cost of one.
    """

    relative_slope: float
    _knots: list[_Knot] = field(default_factory=list)
    _fitted_s: list[float] = field(default_factory=list)
    """The knots' costs, those that would fall averaged."""

    @property
    def is_known(self) -> bool:
        return bool(self._knots)

    def observe(self, amount: int, cost_s: float) -> None:
        if not self._knots:
            self._knots.append(_Knot(amount=_below(amount), cost_s=cost_s))
            self._fitted_s = [cost_s]
        new = {_below(amount), _above(amount)} - {knot.amount for knot in self._knots}
        self._knots += [_Knot(amount=of_grid, cost_s=self(of_grid)) for of_grid in new]
        self._knots.sort(key=lambda knot: knot.amount)
        expected_s = self._raw(amount)
        self._learn(amount, cost_s - expected_s, expected_s)
        self._fitted_s = _never_falling(
            [knot.cost_s for knot in self._knots], [knot.num_seen + 0.01 for knot in self._knots]
        )

    def __call__(self, amount: int) -> float:
        """Seconds; 0 never, once anything is known."""
        return float(self.at(np.array([amount]))[0])

    def at(self, amounts: NDArray[Any]) -> Floats:
        """As a call, of many amounts, which may be fractions."""
        return self._interpolate(amounts, self._fitted_s)

    def as_guess(self) -> "CostCurve":
        """A curve that begins like this one, and is soon convinced of something else."""
        knots = [replace(knot, num_seen=min(knot.num_seen, 1.0)) for knot in self._knots]
        return CostCurve(self.relative_slope, knots, list(self._fitted_s))

    def _learn(self, amount: int, error: float, expected_s: float) -> None:
        low, high = _below(amount), _above(amount)
        share = (amount - low) / (high - low) if high > low else 0.0
        shares = {low: 1.0 - share, high: share} if share else {low: 1.0}
        beside = [knot for knot in self._knots if knot.amount in shares]
        if min(knot.num_seen for knot in beside) >= WELL_KNOWN:
            for knot in self._knots:
                knot.cost_s *= 1.0 + COMMON_RATE * min(error / expected_s, LONGEST_PAUSE)
        norm = sum(share * share for share in shares.values())
        for knot in beside:
            share = shares[knot.amount]
            believed = knot.believe(error, expected_s)
            if believed is None:
                continue
            knot.num_seen += share
            rate = max(LOCAL_RATE, share / knot.num_seen)
            knot.cost_s += rate * believed * share / norm

    def _raw(self, amount: int) -> float:
        costs_s = [knot.cost_s for knot in self._knots]
        return float(self._interpolate(np.array([amount]), costs_s)[0])

    def _interpolate(self, amounts: NDArray[Any], costs_s: Sequence[float]) -> Floats:
        known = [knot.amount for knot in self._knots]
        inside = np.clip(amounts, known[0], known[-1])
        beyond = self._guess(amounts) / self._guess(inside)
        return np.asarray(np.interp(inside, known, costs_s) * beyond, dtype=np.float64)

    def _guess(self, amounts: NDArray[Any]) -> Floats:
        return 1.0 + self.relative_slope * (amounts - 1.0)


def _below(amount: int) -> int:
    """The last knot of the grid that is no greater; the first, if there is none."""
    return KNOTS[max(bisect_right(KNOTS, amount) - 1, 0)]


def _above(amount: int) -> int:
    """The first knot that is no smaller; the last, if there is none."""
    return KNOTS[min(bisect_left(KNOTS, amount), len(KNOTS) - 1)]


def _never_falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls: neighbours that do are averaged (isotonic regression
    by pooling adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, members
    for value, weight in zip(values, weights, strict=True):
        mean, num_members = value, 1
        while pools and pools[-1][0] > mean:
            before, before_weight, before_members = pools.pop()
            mean = (mean * weight + before * before_weight) / (weight + before_weight)
            weight, num_members = weight + before_weight, num_members + before_members
        pools.append((mean, weight, num_members))
    return [mean for mean, _, num_members in pools for _ in range(num_members)]


@dataclass(slots=True)
class DraftCost:
    """By the longest draft; a curve for one sequence at a time, for two or three, four to seven,
    and so on."""

    _curves: dict[int, CostCurve] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        return bool(self._curves)

    def of(self, num_sequences: int) -> CostCurve:
        """What is known of as many sequences, or of the nearest number that was seen."""
        size = num_sequences.bit_length()
        nearest = min(self._curves, key=lambda known: abs(known - size))
        return self._curves[nearest]

    def observe(self, num_sequences: int, longest: int, cost_s: float) -> None:
        size = num_sequences.bit_length()
        if size not in self._curves:
            is_first = not self._curves
            new = CostCurve(relative_slope=0.2) if is_first else self.of(num_sequences).as_guess()
            self._curves[size] = new
        self._curves[size].observe(longest, cost_s)


@dataclass(slots=True)
class RoundCost:
    """A round drafts up to its longest draft, then verifies all its tokens."""

    draft: DraftCost = field(default_factory=DraftCost)
    verify: CostCurve = field(default_factory=lambda: CostCurve(relative_slope=0.02))
    """By the tokens that the target runs, drafts included."""

    @property
    def is_known(self) -> bool:
        return self.draft.is_known and self.verify.is_known
