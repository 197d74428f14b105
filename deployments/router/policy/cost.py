"""What an amount costs, learnt from what amounts did cost. Pure."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Amounts = TypeVar("Amounts", float, NDArray[Any])

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
_GRID = np.array(KNOTS, dtype=float)
_FEW_UNITS = np.arange(97)
"""Amounts whose costs are kept ready: those of most rounds without prompts."""
LOCAL_RATE = 0.03
"""Of an error, the share that a knot takes over once it has been seen often."""
MISSED_RATE = 0.0075
"""At most that share where the curve misses the knot: slowly, so that the curve can come after."""
COMMON_RATE = 0.15
"""The most that all knots take over: the machine has become faster or slower as a whole."""
COMMON_DRIFT = 0.015
"""By how much that changes from one observation to the next. Of noisier costs a smaller share is
taken over, drift / noise, as by a Kalman filter: else noise would shift steps against drafts."""
NOISE_RATE = 0.03
"""Of what is remembered of the noise, the share that an observation replaces."""
MOST_MISSED = 0.05
"""Of the mean of a well-known knot, by how much the curve may miss it."""
WELL_KNOWN = 5.0
"""Observations of a knot after which its errors say something of the others."""
RELIEF_RATE = 0.3
"""The share that all knots take over at most where a knot that is not well known was too dear. Too
low a cost is put right once it is tried, but what seems too dear is not tried."""
MOST_RELIEF = 0.3
"""Of a cost: what is cheaper by more is so for its amount."""
RELIEF_WIDTH = 1.0
"""In logarithms of the amount: of how far away the others have to be known."""
LONGEST_PAUSE = 0.4
"""Of the expected cost: what exceeds it by more is taken for a pause of the machine, no property of
the amount."""
PAUSE_DEVIATIONS = 3.0
"""Of what is expected; where costs are noisier than that, no pause is shorter."""
STIFFNESS = 8.0
"""Observations of a knot that weigh as much as what is known of its neighbour, a unit beside it."""
LEAST_SHARE = 0.1
"""Of what the cheapest of the amounts that were seen cost: nothing costs less, however steeply
costs seem to rise."""
SLOPE_WIDTH = 0.35
"""In logarithms of the amount: slopes are learnt from knots less than twice as large. What prompts
cost would else make a few tokens more seem dear, which memory limits and not arithmetic."""
SLOPE_PRIOR = 15.0
"""What the guess of the slope weighs: as much as so many observations a unit from the others."""
FIT_EVERY = 4
"""Observations after which a curve is fitted anew, once there were FEW of them."""
FEW = 32


def _ties() -> Floats:
    """What draws neighbours towards an even rise, in the least squares of a curve."""
    ties = STIFFNESS / np.diff(_GRID)
    diagonal = np.append(ties, 0.0) + np.append(0.0, ties)
    return np.diag(diagonal) - np.diag(ties, 1) - np.diag(ties, -1)


_TIES = _ties()


def _between(amount: int) -> tuple[list[int], Floats]:
    """The knots beside an amount, and the share of each."""
    low, high = bisect_right(KNOTS, amount) - 1, bisect_left(KNOTS, amount)
    if low == high:
        return [low], np.ones(1)
    share = (amount - KNOTS[low]) / (KNOTS[high] - KNOTS[low])
    return [low, high], np.array([1.0 - share, share])


def _nearness() -> Floats:
    """What a knot says of the slope between two neighbours.  # [pairs of neighbours, knots]"""
    return _near(np.sqrt(_GRID[:-1] * _GRID[1:])[:, None], SLOPE_WIDTH)


def _near(amounts: Floats | int, width: float) -> Floats:
    """From 0 to 1, how near the knots are to amounts."""
    distance = np.log(_GRID / amounts) / width
    near: Floats = np.exp(-0.5 * distance * distance)
    return near


_NEARNESS = _nearness()


class CostCurve:
    """Seconds by amount: straight between knots, and never falling.

    One straight line would not do, since steps cost by steps: matrix kernels work in blocks of
    eight, and what memory limits is limited by arithmetic beyond some batch. Nor would the mean of
    every knot: noise would look like steps, and what once seemed dear would not be tried again. So
    costs are taken to rise as they do nearby, but for a random walk from knot to knot, and the
    curve is the most likely one. Until a slope is seen, one more unit adds `relative_slope` of the
    cost of one.
    """

    def __init__(self, relative_slope: float) -> None:
        self.relative_slope = relative_slope
        self._mean_s = np.zeros(len(KNOTS))
        self._num_seen = np.zeros(len(KNOTS))
        """Observations; one between two knots counts for both in part."""
        self._was_long = np.zeros(len(KNOTS), dtype=bool)
        """Whether a knot's last observation was longer than a pause allows for."""
        self._last_ratio = 1.0
        """Of the last cost to what was expected."""
        self._variance = 0.0
        """Of such ratios."""
        self._fitted_s = np.zeros(len(KNOTS))
        self._few_s: list[float] = []
        """Of few units each, once it was fitted: to look up while a target waits for its tokens."""
        self._num_unfitted = 0
        """Observations since it was fitted."""

    @property
    def is_known(self) -> bool:
        return bool(self._num_seen.any())

    def observe(self, amount: int, cost_s: float) -> None:
        if not self.is_known:
            self._fitted_s = cost_s * self._guess(_GRID) / self._guess(amount)
            self._mean_s = self._fitted_s.copy()
        self._learn(amount, cost_s)
        self._num_unfitted += 1
        if self._num_unfitted >= FIT_EVERY or self._num_seen.sum() <= FEW:
            self._fit()
            self._num_unfitted = 0

    def scale(self, factor: float) -> None:
        """All amounts have become so many times as dear."""
        self._mean_s *= factor
        self._fitted_s *= factor
        self._few_s = [cost_s * factor for cost_s in self._few_s]

    def __call__(self, amount: int) -> float:
        """Seconds; 0 never, once anything is known."""
        if 0 <= amount < len(self._few_s):
            return self._few_s[amount]
        inside = min(max(amount, KNOTS[0]), KNOTS[-1])
        low = bisect_right(KNOTS, inside) - 1
        cost_s = float(self._fitted_s[low])
        if inside > KNOTS[low]:
            share = (inside - KNOTS[low]) / (KNOTS[low + 1] - KNOTS[low])
            cost_s += share * (float(self._fitted_s[low + 1]) - cost_s)
        return cost_s * self._guess(amount) / self._guess(inside)

    def at(self, amounts: NDArray[Any]) -> Floats:
        """As a call, of many amounts, which may be fractions."""
        inside = np.minimum(np.maximum(amounts, KNOTS[0]), KNOTS[-1])
        costs_s: Floats = np.interp(inside, _GRID, self._fitted_s)
        costs_s *= self._guess(amounts) / self._guess(inside)
        return costs_s

    def as_guess(self) -> "CostCurve":
        """A curve that begins like this one, and is soon convinced of something else."""
        guess = CostCurve(self.relative_slope)
        guess._mean_s, guess._fitted_s = self._fitted_s.copy(), self._fitted_s.copy()
        guess._num_seen = np.minimum(self._num_seen, 1.0)
        guess._variance = self._variance
        return guess

    def _learn(self, amount: int, cost_s: float) -> None:
        inside = min(max(amount, KNOTS[0]), KNOTS[-1])
        knots, shares = _between(inside)
        is_missed = self._is_missed(knots)
        base_s: Floats = (self._mean_s if is_missed else self._fitted_s)[knots]
        expected_s = float(shares @ base_s) * self._guess(amount) / self._guess(inside)
        ratio = self._believed(knots, cost_s / expected_s)
        # of neighbours in time, so that a machine that has become slower does not look like noise
        change, self._last_ratio = ratio - self._last_ratio, ratio
        self._variance += NOISE_RATE * (0.5 * change * change - self._variance)
        # pauses only make longer, and fewer tokens never cost more: what hardly was seen, and was
        # dearer than this by more than a pause is, was one
        doubtful = (self._num_seen < WELL_KNOWN) & (amount >= _GRID)
        self._mean_s[doubtful] = np.minimum(self._mean_s[doubtful], (1.0 + LONGEST_PAUSE) * cost_s)
        self._mean_s *= self._common(amount, knots, ratio)
        self._num_seen[knots] += shares
        rates = np.maximum(LOCAL_RATE, shares / self._num_seen[knots])
        if is_missed:
            rates = np.minimum(rates, MISSED_RATE)
        self._mean_s[knots] += rates * (base_s * ratio - self._mean_s[knots])

    def _is_missed(self, knots: list[int]) -> bool:
        """Whether the curve does not pass through what is well known.

        Compared with it, every cost there would seem other than expected, and all knots would be
        drawn after it, which makes the curve miss by more. So costs are compared with their mean.
        """
        means_s, fitted_s = self._mean_s[knots], self._fitted_s[knots]
        is_known = self._num_seen[knots].min() >= WELL_KNOWN
        return bool(is_known and np.abs(fitted_s - means_s).max() > MOST_MISSED * means_s.min())

    def _common(self, amount: int, knots: list[int], ratio: float) -> float:
        """What of the ratio of a cost between these knots to what was expected is so for all."""
        if self._num_seen[knots].min() >= WELL_KNOWN:
            noise = math.sqrt(self._variance)
            rate = COMMON_RATE if noise * COMMON_RATE < COMMON_DRIFT else COMMON_DRIFT / noise
            return 1.0 + rate * (ratio - 1.0)
        if ratio >= 1.0:
            return 1.0
        num_near = float(_near(max(amount, KNOTS[0]), RELIEF_WIDTH) @ self._num_seen)
        rate = RELIEF_RATE * num_near / (num_near + WELL_KNOWN)
        return 1.0 - rate * min(1.0 - ratio, MOST_RELIEF)

    def _believed(self, knots: list[int], ratio: float) -> float:
        """What to learn of the ratio of a cost between these knots to what was expected.

        What is much longer once is taken for a pause, and learnt in part; twice in a row, it is no
        pause, and soon outweighs what was known.
        """
        longest = 1.0 + max(LONGEST_PAUSE, PAUSE_DEVIATIONS * math.sqrt(self._variance))
        is_long = ratio > longest
        if is_long and self._was_long[knots].all():
            self._num_seen[knots] = np.minimum(self._num_seen[knots], WELL_KNOWN)
        elif is_long:
            ratio = longest
        self._was_long[knots] = is_long
        return ratio

    def _fit(self) -> None:
        # a mean that forgets at this rate is as good as one of so many
        weights = np.minimum(self._num_seen, 2.0 / LOCAL_RATE)
        system = _TIES.copy()
        system.flat[:: len(KNOTS) + 1] += weights
        known = weights * self._mean_s
        # between two knots, what the slope adds to one it takes from the other
        pulls = STIFFNESS * self._slopes(weights)
        known[:-1] -= pulls
        known[1:] += pulls
        least_s = LEAST_SHARE * self._mean_s[self._num_seen > 0].min()
        fitted_s = np.maximum(np.linalg.solve(system, known), least_s)
        self._fitted_s = np.array(_never_falling(fitted_s.tolist(), (weights + 0.01).tolist()))
        self._few_s = self.at(_FEW_UNITS).tolist()

    def _slopes(self, weights: Floats) -> Floats:
        """Seconds that one more unit adds between neighbours.  # [pairs of neighbours]"""
        near = _NEARNESS * weights
        near /= (share := near.sum(axis=1))[:, None]
        middles, means_s = near @ _GRID, near @ self._mean_s
        # of a line that has the mean of what was seen in their middle
        guesses = means_s / self._guess(middles) * self.relative_slope
        away = _GRID - middles[:, None]
        covariances = share * ((near * away) @ self._mean_s)
        spreads = share * (near * away * away).sum(axis=1)
        slopes: Floats = (covariances + SLOPE_PRIOR * guesses) / (spreads + SLOPE_PRIOR)
        return np.maximum(slopes, 0.0)

    def _guess(self, amounts: Amounts) -> Amounts:
        return 1.0 + self.relative_slope * (amounts - 1.0)


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
