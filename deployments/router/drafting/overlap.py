"""Whether the drafter goes on while the target verifies. Pure.

It pays where both have hardware of their own: the next round then starts with drafts in hand, if
the drafter guessed the target's next token too. Where they share cores it slows the target down.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from deployments.router.policy.gamma import ObservedRound
from deployments.router.policy.round_cost import SizedCost, draft_cost, verify_cost

TRY_EVERY = 32
"""Rounds after which it is done the other way for a while, to see whether that is better. Twice as
many after each try that changes nothing, since tries cost what they show."""
TRY_AT_LEAST_EVERY = 128
TRY_ROUNDS = 4
MARGIN = 0.02
"""Of a round, what overlapping must save: less is noise."""
RATE = 0.1
"""Of an error, the share that an average takes over."""
LONGEST_PAUSE = 3.0
"""Times its expected duration: a round that takes longer met a pause of the machine."""


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
    """Always, or never."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on

    def choose(self) -> bool:
        return self._is_on

    def observe(self, observed: ObservedRound) -> None:
        """Nothing to learn."""


@dataclass(slots=True)
class _Average:
    value: float = 0.0
    num_seen: int = 0

    def observe(self, value: float) -> None:
        self.num_seen += 1
        self.value += max(RATE, 1.0 / self.num_seen) * (value - self.value)


@dataclass(slots=True)
class MeasuredOverlap:
    """Does what has taken less time of late.

    Rounds without overlap say what drafting and verifying cost; an overlapped verification takes
    longer than that, and the drafting after it less.
    """

    _draft: SizedCost = field(default_factory=draft_cost)
    _verify: SizedCost = field(default_factory=verify_cost)
    """Both without overlap."""
    _slowdown_s: _Average = field(default_factory=_Average)
    _saving_s: _Average = field(default_factory=_Average)
    _round_s: _Average = field(default_factory=_Average)
    _num_rounds: int = 0
    """Since the last try."""
    _try_every: int = TRY_EVERY
    _did_pay: bool = False
    """At the last try."""

    @property
    def pays(self) -> bool:
        """Whether an overlapped round is the shorter one, by what was measured so far."""
        least_s = self._slowdown_s.value + MARGIN * self._round_s.value
        return self._saving_s.num_seen > 0 and self._saving_s.value > least_s

    def choose(self) -> bool:
        is_trial = self._num_rounds >= self._try_every - TRY_ROUNDS
        return self.pays != is_trial

    def observe(self, observed: ObservedRound) -> None:
        if observed.longest_draft == 0:
            return
        self._count_round()
        self._round_s.observe(observed.draft_s + observed.verify_s)
        if not observed.is_after_overlap and observed.is_draft_typical:
            self._draft.observe(observed.num_drafted, observed.longest_draft, observed.draft_s)
        elif observed.is_after_overlap and self._draft.is_known:
            alone_s = self._draft.of(len(observed.outcomes) or 1)(observed.longest_draft)
            self._saving_s.observe(alone_s - min(observed.draft_s, LONGEST_PAUSE * alone_s))
        if not observed.is_verify_typical:
            return
        if not observed.is_overlapped:
            self._verify.observe(observed.num_sequences, observed.num_tokens, observed.verify_s)
        elif self._verify.is_known:
            alone_s = self._verify.of(observed.num_sequences)(observed.num_tokens)
            self._slowdown_s.observe(min(observed.verify_s, LONGEST_PAUSE * alone_s) - alone_s)

    def _count_round(self) -> None:
        self._num_rounds += 1
        if self._num_rounds == self._try_every:
            is_as_before = self.pays == self._did_pay
            self._try_every = (
                min(2 * self._try_every, TRY_AT_LEAST_EVERY) if is_as_before else TRY_EVERY
            )
            self._num_rounds, self._did_pay = 0, self.pays
