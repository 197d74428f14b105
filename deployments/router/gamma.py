"""How far to speculate. Pure: no clock, no Ray, no torch.

A controller is asked once per round for every sequence that is about to be verified, and told
afterwards what became of the drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A sequence of the coming round."""

    seq_id: str
    max_gamma: int
    """What the tokens left and the configured maximum allow; 0 where there is no drafter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a sequence's drafts in a round."""

    seq_id: str
    num_draft_tokens: int
    num_tested: int
    num_accepted: int


class GammaController(Protocol):
    def choose(self, candidates: Sequence[Candidate]) -> list[int]:
        """The draft length of each candidate for this round."""
        ...

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from a round."""
        ...


class FixedGamma:
    """The same draft length for all, until it is set to another."""

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma

    def choose(self, candidates: Sequence[Candidate]) -> list[int]:
        return [min(self.gamma, candidate.max_gamma) for candidate in candidates]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn."""
