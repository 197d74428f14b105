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


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRound:
    """What a round did and what it took."""

    outcomes: tuple[Outcome, ...]
    """Of the sequences that were verified with drafts."""
    longest_draft: int
    """That drafters were asked for; they may have brought less, or nothing in time."""
    num_tokens: int
    """Run by the target, drafts included."""
    is_prefill: bool
    """Whether a sequence without its cache was verified."""
    draft_s: float
    """The way to the drafters and back included."""
    verify_s: float


class GammaController(Protocol):
    def choose(self, candidates: Sequence[Candidate]) -> list[int]:
        """The draft length of each candidate for this round."""
        ...

    def observe(self, observed: ObservedRound) -> None:
        """Learn from a round."""
        ...

    def forget(self, seq_id: str) -> None:
        """A sequence has ended."""
        ...


class FixedGamma:
    """The same draft length for all."""

    def __init__(self, gamma: int) -> None:
        self._gamma = gamma

    def choose(self, candidates: Sequence[Candidate]) -> list[int]:
        return [min(self._gamma, candidate.max_gamma) for candidate in candidates]

    def observe(self, observed: ObservedRound) -> None:
        """Nothing to learn."""

    def forget(self, seq_id: str) -> None:
        """Nothing was learnt."""
