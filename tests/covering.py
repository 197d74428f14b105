"""Fewer cases than all combinations of several dimensions: enough for every pair of values."""

from collections.abc import Sequence
from itertools import combinations, product

Case = tuple[int, ...]
"""The index of a value of each dimension."""
Pair = tuple[tuple[int, int], tuple[int, int]]
"""Two dimensions, each with the index of one of its values."""


def covering_cases(sizes: Sequence[int]) -> list[Case]:
    """Cases among which any two values of different dimensions meet, for dimensions of these sizes.

    Each case is the first of those that have the most pairs that are still missing, so that values
    that come first are in more of them: what takes longest had better be the last.
    """
    candidates = {case: _pairs(case) for case in product(*map(range, sizes))}
    missing = set().union(*candidates.values())
    chosen = []
    while missing:
        best = max(candidates, key=lambda case: len(candidates[case] & missing))
        missing -= candidates.pop(best)
        chosen.append(best)
    return chosen


def all_cases(sizes: Sequence[int]) -> list[Case]:
    return list(product(*map(range, sizes)))


def _pairs(case: Case) -> set[Pair]:
    return set(combinations(enumerate(case), 2))
