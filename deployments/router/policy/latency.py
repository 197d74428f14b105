"""Seconds of a draft and of a verification, by what they run.

    draft(n, steps)   = draft_hop + steps * draft_factor * D(n)
    ahead(n, steps)   = steps * ahead_factor * T(n, n)
    verify(n, tokens) = rest + factor * T(n, tokens)

T and D are the workers' own measured tables of their steps, by sequences and tokens. A factor
follows how much slower steps are than the table says (other load, long contexts), the hop what a
call to a drafter takes beside its drafts, as by reading what is new before the first, and the rest
what a call to the target does and what the router takes between calls, which drafts make rarer.
Rounds without drafts have a factor and a rest of their own: where router and workers share cores,
the texts of the last round are written out during their step. A target that drafts by its own first
layers takes some share of a whole step for each draft.

Without a table, as for the drafters of an app that has none, T and D are 1 for every step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deployments.router.policy.gamma import ObservedRound
from workers.types import StepTime

Floats = NDArray[np.float64]
Row = tuple[Floats, Floats]
"""Numbers of tokens, rising, and the seconds of a step of each."""

RATE = 0.03
"""The share of an error that an estimate of a time takes over."""
OUTLIER = 0.4
"""A time that is off by more than this, as a logarithm, is taken for a stall and clipped. When the
next is off to the same side, the machine has changed: clip and rate are doubled each time."""
FAR = 4096.0
"""How many tokens beyond the end of a table its last row goes on rising."""
LEAST_S = 1e-6
"""The shortest time that is believed, in seconds, so that every time has a logarithm."""


@dataclass(slots=True)
class Follower:
    """A positive number that is observed with noise and stalls: its geometric mean of late."""

    value: float
    """The mean; a guess before anything was observed."""
    experience: float = 0.0
    """How many observations the mean stands for, older ones counting less. A guess counts as one,
    or as none if the first observation is to replace it."""
    is_known: bool = False
    """Whether anything was observed."""
    _run: int = 0
    """How many of the last observations were outliers to the same side, with its sign."""

    def observe(self, seen: float, *, kin: "Follower | None" = None) -> None:
        """Learn from an observation. Most of what changes this number changes `kin` alike: that
        follows, the more so the less is known of it and the more of this."""
        error = math.log(max(seen, LEAST_S) / self.value)
        boost = 2.0 ** abs(self._run) if self._run * error > 0 else 1.0
        if self.experience:
            is_outlier = abs(error) > OUTLIER
            self._run = self._run * (boost > 1) + int(math.copysign(1, error)) if is_outlier else 0
            error = max(-OUTLIER * boost, min(OUTLIER * boost, error))
        rate = min(0.5, RATE * boost)
        self.experience = self.experience * (1.0 - rate) + 1.0
        self.value *= math.exp(error / self.experience)
        self.is_known = True
        if kin is not None and not kin.is_known:
            kin.value, kin.experience = self.value, 1.0
        elif kin is not None:
            share = self.experience / (self.experience + kin.experience)
            kin.value *= math.exp(share * error / self.experience)
            kin.experience *= (1.0 - rate) / (1.0 - RATE)


class StepTable:
    """Seconds of a step by sequences and tokens: straight between the measured points.

    A jump is two points with neighbouring numbers of tokens.
    """

    def __init__(self, times: Sequence[StepTime]) -> None:
        by_size: dict[int, dict[int, float]] = {}
        for time in times:
            if math.isfinite(time.seconds) and time.seconds > 0.0:
                by_size.setdefault(time.num_sequences, {})[time.num_tokens] = time.seconds
        self._sizes = sorted(by_size)
        self._rows = {size: _rising(by_size[size]) for size in self._sizes}
        """The row of each number of sequences that was measured or has been asked for."""
        if not self._sizes:
            return
        last = self._sizes[-1]
        self._rows[last] = _continued(self._rows[last])
        for size, larger in reversed(list(pairwise(self._sizes))):
            self._rows[size] = _continued_like(self._rows[size], self._rows[larger])

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def seconds(self, num_sequences: int, num_tokens: ArrayLike) -> Floats:
        """Seconds of a step of so many sequences and tokens; 1 where no step was timed.

        Shapes: [any] tokens -> [any] seconds.
        """
        if not self._sizes:
            return np.ones(np.shape(num_tokens))
        if num_sequences not in self._rows:
            place = float(np.interp(num_sequences, self._sizes, np.arange(len(self._sizes))))
            low, high = self._rows[self._sizes[int(place)]], self._rows[self._sizes[-1]]
            if place % 1.0:
                high = self._rows[self._sizes[int(place) + 1]]
            self._rows[num_sequences] = _between(low, high, place % 1.0)
        amounts = np.asarray(num_tokens, dtype=float)
        seconds: Floats = np.interp(amounts, *self._rows[num_sequences])
        return seconds


def _rising(seconds: dict[int, float]) -> Row:
    """A row in which more tokens never take less."""
    amounts = np.array(sorted(seconds), dtype=float)
    times_s = np.array([seconds[int(amount)] for amount in amounts])
    return amounts, np.maximum.accumulate(times_s)


def _continued(row: Row) -> Row:
    """A row that rises far beyond its end as it did from its middle on."""
    amounts, times_s = row
    middle = (len(amounts) - 1) // 2
    rise = (times_s[-1] - times_s[middle]) / max(1.0, amounts[-1] - amounts[middle])
    return np.append(amounts, amounts[-1] + FAR), np.append(times_s, times_s[-1] + FAR * rise)


def _continued_like(row: Row, larger: Row) -> Row:
    """A row that rises beyond its end as the row of more sequences does there."""
    (amounts, times_s), (more, more_s) = row, larger
    is_beyond = more > amounts[-1]
    ratio = times_s[-1] / np.interp(amounts[-1], more, more_s)
    return np.append(amounts, more[is_beyond]), np.append(times_s, ratio * more_s[is_beyond])


def _between(low: Row, high: Row, share: float) -> Row:
    """The row of a number of sequences between those of two rows.

    The row of more sequences begins with more tokens; before, it is that much dearer too.
    """
    amounts = np.union1d(low[0], high[0])
    inside = np.maximum(amounts, high[0][0])
    dearer = np.interp(inside, *high) / np.interp(inside, *low)
    return amounts, np.interp(amounts, *low) * (1.0 + share * (dearer - 1.0))


@dataclass(slots=True, kw_only=True)
class _Rounds:
    """What is known of rounds that ask a drafter, or of those that do not."""

    factor: Follower
    """How many times as long as the table says a step of the target takes."""
    rest: Follower = field(default_factory=lambda: Follower(LEAST_S))
    """Seconds of a round beside drafting and that step."""


class Latency:
    """The times of rounds on these workers."""

    def __init__(
        self, *, target_steps: Sequence[StepTime] = (), draft_steps: Sequence[StepTime] = ()
    ) -> None:
        self._target_table = StepTable(target_steps)
        experience = float(bool(self._target_table))
        self._drafted = _Rounds(factor=Follower(1.0, experience=experience))
        self._plain = _Rounds(factor=Follower(1.0, experience=experience))
        self.most_tokens = max((step.num_tokens for step in target_steps), default=0)
        """The tokens of the largest step that the target has measured."""
        self._draft_table = StepTable(draft_steps)
        self._draft_factor = Follower(1.0 if draft_steps else LEAST_S)
        """How many times as long as the table says a draft step takes; without one, its seconds."""
        self._draft_hop = Follower(LEAST_S)
        self._ahead_factor = Follower(LEAST_S)

    @property
    def is_known(self) -> bool:
        """Whether both drafts and verifications with drafts were seen."""
        return self._draft_hop.is_known and self._drafted.factor.is_known

    def draft_s(self, num_sequences: int, num_steps: ArrayLike) -> Floats:
        """Seconds until drafters have made so many steps for these sequences; nearly nothing while
        nothing is known, so that it is found out.

        Shapes: [any] steps -> [any] seconds.
        """
        step_s = self._draft_factor.value * self._draft_steps(num_sequences)
        return self._draft_hop.value + step_s * np.asarray(num_steps, dtype=float)

    def ahead_s(self, num_sequences: int, num_steps: ArrayLike) -> Floats:
        """Seconds until the target has made so many drafts itself for each of these sequences;
        nearly nothing while nothing is known, so that it is found out.

        Shapes: [any] steps -> [any] seconds.
        """
        whole_s = float(self._target_table.seconds(num_sequences, num_sequences))
        step_s = self._ahead_factor.value * whole_s
        return step_s * np.asarray(num_steps, dtype=float)

    def verify_s(
        self, num_sequences: int, num_tokens: ArrayLike, *, is_after_drafting: ArrayLike
    ) -> Floats:
        """Seconds of a round beside drafting: those of the verification of so many tokens, drafts
        and others' included, and of the router.

        Shapes: [any] tokens -> [any] seconds; `is_after_drafting` one for all or [any].
        """
        drafted, plain = self._drafted, self._plain
        factor = np.where(is_after_drafting, drafted.factor.value, plain.factor.value)
        rest_s = np.where(is_after_drafting, drafted.rest.value, plain.rest.value)
        return rest_s + factor * self._target_table.seconds(num_sequences, num_tokens)

    def prompts_s(self, num_tokens: float) -> float:
        """Seconds of a step of nothing but so many tokens of prompts."""
        return self._plain.factor.value * float(self._target_table.seconds(1, num_tokens))

    def observe(self, observed: ObservedRound) -> None:
        """Learn from the times of a round that are clean."""
        if observed.draft_s is not None and observed.longest_draft > 0:
            step_s = self._draft_steps(observed.num_drafted)
            num_further = observed.longest_draft - 1
            if num_further > 0 and observed.draft_further_s > 0.0:
                self._draft_factor.observe(observed.draft_further_s / (num_further * step_s))
            first_s = self._draft_factor.value * step_s
            self._draft_hop.observe(observed.draft_s - observed.draft_further_s - first_s)
        if observed.ahead_s is not None and observed.longest_ahead > 0:
            whole_s = float(self._target_table.seconds(observed.num_ahead, observed.num_ahead))
            self._ahead_factor.observe(observed.ahead_s / (observed.longest_ahead * whole_s))
        if observed.verify_s is not None and observed.num_tokens > 0:
            seen, other = self._plain, self._drafted
            if observed.longest_draft > 0:
                seen, other = other, seen
            step_s = float(self._target_table.seconds(observed.num_sequences, observed.num_tokens))
            hop_s = observed.verify_s - observed.verify_compute_s
            seen.factor.observe(observed.verify_compute_s / step_s, kin=other.factor)
            seen.rest.observe(hop_s + observed.router_s, kin=other.rest)

    def _draft_steps(self, num_sequences: int) -> float:
        """What the table says of a draft step, in seconds."""
        return float(self._draft_table.seconds(num_sequences, num_sequences))
