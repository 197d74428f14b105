"""What a round costs, and what rounds make of their time. Pure."""

import math
from dataclasses import dataclass, field
from statistics import fmean

from deployments.router.policy.cost import CostCurve

RECENT = 0.03
"""Of what is remembered of the rate, the share that a round replaces."""
MOST_SURPLUS = 0.5
"""Of a round."""
NUM_ALIKE = 4
"""Rounds without drafts that are learnt from together."""
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

    def scale(self, num_sequences: int, factor: float) -> None:
        """All amounts have become so many times as dear, for as many sequences."""
        if (curve := self._curves.get(_size(num_sequences))) is not None:
            curve.scale(factor)


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
    """A round drafts up to its longest draft, then verifies all its tokens.

    A round without drafts may take longer than a step of more tokens after a draft: the texts of
    the last round are handed out during whatever comes next, which takes the processor from it.
    Such a surplus is learnt apart from what tokens cost.
    """

    draft: SizedCost = field(default_factory=draft_cost)
    verify: SizedCost = field(default_factory=verify_cost)
    """Without that surplus."""
    _plain: dict[int, CostCurve] = field(default_factory=dict)
    """By size: of rounds without drafts and without tokens of others, by the number of sequences.

    What is not observed at present becomes dearer and cheaper with what is, as on a machine that
    becomes slower or faster: nothing else would be learnt of drafts while none are made, and what
    only seems dear is not tried.
    """
    _alike: tuple[int, int] = (0, 0)
    """Sequences and tokens of the last rounds without drafts, which are yet to be learnt from."""
    _times_s: list[float] = field(default_factory=list)
    """Of those."""

    @property
    def is_known(self) -> bool:
        return self.draft.is_known and self.verify.is_known

    def plain_s(self, num_sequences: int, num_beside: int = 0) -> float:
        """Of a round without drafts, beside that many tokens of others."""
        step_s = self.verify.of(num_sequences)(num_sequences + num_beside)
        return step_s + self._surplus_s(num_sequences)

    def observe_drafted(self, num_sequences: int, num_tokens: int, verify_s: float) -> None:
        """The verification of a round with drafts."""
        self.learn_plain()
        of_two_s = self.verify.of(num_sequences)(2 * num_sequences) if self.verify.is_known else 0.0
        self.verify.observe(num_sequences, num_tokens, verify_s)
        if of_two_s and (plain := self._plain.get(_size(num_sequences))) is not None:
            # of the curve, not of what was observed: noise that leaves it as it was adds up to none
            plain.scale(self.verify.of(num_sequences)(2 * num_sequences) / of_two_s)

    def observe_plain(
        self, num_sequences: int, num_tokens: int, verify_s: float, *, is_idle: bool
    ) -> None:
        """A round without drafts; `is_idle` if none are made at present.

        Of alike ones in a row the mean is learnt then: it says as much, and takes less of the
        processor, which the target needs.
        """
        if self._alike != (num_sequences, num_tokens):
            self.learn_plain()
            self._alike = num_sequences, num_tokens
        self._times_s.append(verify_s)
        if not is_idle or len(self._times_s) == NUM_ALIKE:
            self.learn_plain(is_idle=is_idle)

    def learn_plain(self, *, is_idle: bool = False) -> None:
        """Learn from what is yet to be learnt from."""
        if not self._times_s:
            return
        (num_sequences, num_tokens), time_s = self._alike, fmean(self._times_s)
        self._times_s.clear()
        surplus_s = min(self._surplus_s(num_sequences), MOST_SURPLUS * time_s)
        self.verify.observe(num_sequences, num_tokens, time_s - surplus_s)
        if num_tokens > num_sequences:
            return
        plain = self._plain.get(size := _size(num_sequences))
        if plain is None:
            self._plain[size] = plain = self.verify.of(num_sequences).as_guess()
        before_s = plain(num_sequences)
        plain.observe(num_sequences, time_s)
        if is_idle:
            self.draft.scale(num_sequences, plain(num_sequences) / before_s)

    def _surplus_s(self, num_sequences: int) -> float:
        """More tokens never cost less, so what a round takes beyond one with more is surplus."""
        if (plain := self._plain.get(_size(num_sequences))) is None:
            return 0.0
        return max(0.0, plain(num_sequences) - self.verify.of(num_sequences)(num_sequences + 1))


def _size(num_sequences: int) -> int:
    # the nearest power of two: while one of eight sequences ends, seven are known by the same curve
    return round(math.log2(max(1, num_sequences)))
