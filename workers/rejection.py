"""Rejection: a draft is accepted with probability min(1, p / q).

Here p is the target's law at the position of a draft, and q the law that the draft was drawn from.
If a draft is rejected, max(p - q, 0) is the law of the token in its place; if none is, p is the law
of the next one. The text then has the law of the target alone, whatever q is (Leviathan, Kalman and
Matias 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318). Of all rules that look at one
draft at a time it accepts the most: sum(min(p, q)) of what is drafted.

Numbers are floats, or fractions where exactness is tested.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Number = Any
"""A float or a Fraction."""

Happens = Callable[[int, Number], bool]
"""A function that says whether something of this probability happens to the draft of this index,
apart from what happens to others."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LawsAtDraft:
    """Both laws at the position of a draft, over the tokens that the drafter could have drawn."""

    drafted: int
    """Which of these tokens the draft is."""
    p: NDArray[Any]
    """Probabilities by the target's law.  # [width]"""
    q: NDArray[Any]
    """Probabilities by the drafter's law, all above 0.  # [width]"""
    others: Number
    """The target's probability of all other tokens together."""

    @property
    def ratio(self) -> Number:
        """How much likelier the draft is by the target's law than by the drafter's."""
        return self.p[self.drafted] / self.q[self.drafted]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How many drafts are accepted, and what the law of the next token has to make up for."""

    num_accepted: int
    scale: Number = 1
    """What p is multiplied by in the residual law."""


def decide_by_rejection(laws: Sequence[LawsAtDraft], happens: Happens) -> Decision:
    """Accept drafts up to the first that is rejected.  # laws [gamma]"""
    for index, law in enumerate(laws):
        if not happens(index, min(law.ratio, 1)):
            return Decision(num_accepted=index)
    return Decision(num_accepted=len(laws))


def residual(law: LawsAtDraft, scale: Number) -> NDArray[Any]:
    """The weights of the law of the token that takes the place of a draft: max(scale * p - q, 0).

    Tokens that the drafter could not have drawn keep p as their weight, so all is divided by
    `scale`. Where nothing is left, which takes a rejection of probability 0, p is.  # [width]
    """
    left: NDArray[Any] = np.maximum(law.p - law.q / scale, 0)
    return left if left.sum() + law.others > 0 else law.p
