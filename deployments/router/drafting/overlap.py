"""The choice whether drafters go on while the target verifies.

It pays where both have hardware of their own: the next round then starts with drafts in hand, if
the drafter guessed the target's next token too. Where they share cores it slows the target down.
So rounds are compared with what they would take without, seconds / (draft + verify), and now and
then a few rounds are done the other way.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from deployments.router.policy.gamma import ObservedRound
from deployments.router.policy.latency import Latency

TRY_EVERY = 96
"""The number of rounds in which the other way is tried once, to see whether it is better by now."""
TRY_ROUNDS = 4
"""The number of rounds in a row for which the other way is tried."""
MARGIN = 0.02
"""The share of a round that overlapping must save: less is noise."""
RATE = 0.1
"""The share of an error that a mean takes over."""


class Overlap(Protocol):
    def choose(self) -> bool:
        """Whether the drafter goes on during the coming verification."""
        ...

    def observe(self, observed: ObservedRound) -> None:
        """Learn from a round."""
        ...


def make_overlap(option: Literal["auto", "on", "off"]) -> Overlap:
    """The policy that an option names."""
    return MeasuredOverlap() if option == "auto" else FixedOverlap(is_on=option == "on")


class FixedOverlap:
    """The policy of an option: drafters always go on, or never."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on

    def choose(self) -> bool:
        return self._is_on

    def observe(self, observed: ObservedRound) -> None: ...


@dataclass(slots=True)
class MeasuredOverlap:
    """The policy that does what has taken less time of late."""

    _latency: Latency = field(default_factory=Latency)
    """What draft and verification take without overlap, in seconds."""
    _ratios: dict[bool, float] = field(default_factory=lambda: {False: 1.0, True: 1.0})
    """What rounds took in terms of what they would take without overlap: with it and without."""
    _num_rounds: int = 0
    """Rounds with drafts."""

    @property
    def pays(self) -> bool:
        """Whether rounds with overlap are the shorter ones, by what was measured so far."""
        return self._ratios[True] < self._ratios[False] - MARGIN

    def choose(self) -> bool:
        is_try = self._num_rounds % TRY_EVERY >= TRY_EVERY - TRY_ROUNDS
        return self.pays != is_try

    def observe(self, observed: ObservedRound) -> None:
        self._latency.observe(observed)
        if observed.longest_draft == 0:
            return
        self._num_rounds += 1
        if observed.is_overlapped == observed.is_after_overlap and self._latency.is_known:
            num_sequences, num_tokens = observed.num_sequences, observed.num_tokens
            alone_s = float(
                self._latency.draft_s(num_sequences, observed.longest_draft)
                + self._latency.verify_s(num_sequences, num_tokens, is_after_drafting=True)
            )
            error = min(observed.round_s / alone_s, 2.0) - self._ratios[observed.is_overlapped]
            self._ratios[observed.is_overlapped] += RATE * error
