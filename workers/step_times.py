"""A worker's own table of step times: measured where it runs, not guessed.

The router plans with seconds(sequences, tokens). Their shape depends on the machine: a GPU's steps
grow at the sizes of its graphs, a CPU's from 8 tokens on. So each worker times steps of a small
grid of sizes, one step at a time: all at once when it starts, and between the steps of others when
a compiled forward has taken over.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from workers.types import StepTime

Size = tuple[int, int]
"""The number of sequences, and of new tokens of all of them together."""

NUM_SEQUENCES = (1, 2, 4, 8, 16, 32)
NUM_TOKENS = (1, 2, 4, 8, 9, 16, 32, 64, 128)
"""Every size of a CUDA graph up to 128, and the first beyond 8, up to which our CPU products cost
alike."""
MAX_TOKENS_EACH = 16
"""Tokens of one sequence in a verification: the newest and its drafts, rarely more."""
NUM_REPEATS = 6
START_BUDGET_S = 1.5
"""Seconds of timed steps before a worker's first call; a large model's table has fewer sizes."""
BACKGROUND_BUDGET_S = 6.0
"""Seconds of timed steps between those of calls, which nobody waits for."""


def _in_order(sizes: Sequence[Size]) -> tuple[Size, ...]:
    """Sizes, coarse ones first, so that a table cut short spans the range; small before large."""
    return tuple(sorted(sizes, key=lambda size: (size[0] not in (1, 8), size[1], size[0])))


VERIFY_SIZES = _in_order(
    [
        (num_sequences, num_tokens)
        for num_sequences in NUM_SEQUENCES
        for num_tokens in NUM_TOKENS
        if num_sequences <= num_tokens <= MAX_TOKENS_EACH * num_sequences
    ]
)
DRAFT_SIZES = _in_order([(num_sequences, num_sequences) for num_sequences in NUM_SEQUENCES])


class StepTable:
    """The times of a worker's steps, by the forward that runs them now."""

    def __init__(
        self,
        sizes: Sequence[Size],
        time_step: Callable[[Size], float],
        *,
        forward: Callable[[], object],
    ) -> None:
        """Start without times.

        Args:
            sizes: those of the table, most important first.
            time_step: runs a step of a size; returns its seconds.
            forward: what runs steps at the moment; when it is another one, times are outdated.
        """
        self._sizes = sizes
        self._time_step = time_step
        self._forward = forward
        self._timed_forward: object = None
        self._timing: StepTiming | None = None
        self._current: tuple[int, tuple[StepTime, ...]] = (0, ())

    @property
    def times(self) -> tuple[StepTime, ...]:
        """The newest complete table; empty before the first."""
        return self._current[1]

    @property
    def version(self) -> int:
        """How often a table was replaced by a newer one."""
        return self._current[0]

    @property
    def is_outdated(self) -> bool:
        """Whether steps were timed once, and another forward has taken over since."""
        return bool(self.times) and (
            self._timing is not None or self._timed_forward != self._forward()
        )

    def measure(self) -> None:
        """Time all steps in a row; for a worker before its first call."""
        self._start(START_BUDGET_S)
        while self._timing is not None:
            self.time_one_step()

    def time_one_step(self) -> float:
        """Go on with a new table by one step; returns its seconds.

        The table takes the old one's place once it is complete.
        """
        if self._timing is None or self._timed_forward != self._forward():
            self._start(BACKGROUND_BUDGET_S)
        assert self._timing is not None
        seconds = self._timing.time_one()
        if self._timing.is_done:
            self._current = (self.version + bool(self.times), self._timing.times)
            self._timing = None
        return seconds

    def _start(self, budget_s: float) -> None:
        self._timed_forward = self._forward()
        self._timing = StepTiming(self._sizes, self._time_step, budget_s=budget_s)


class StepTiming:
    """A table in the making."""

    def __init__(
        self,
        sizes: Sequence[Size],
        time_step: Callable[[Size], float],
        *,
        budget_s: float = START_BUDGET_S,
    ) -> None:
        """Start a table of these sizes, most important first.

        Args:
            time_step: runs a step of a size; returns its seconds.
            budget_s: bounds the seconds of all steps, but for one that is longer by itself.
        """
        self._time_step = time_step
        self._left_s = budget_s
        self._seconds: dict[Size, list[float]] = defaultdict(list)
        # the first twice: what every step needs for the first time is loaded in it
        self._due: Iterator[Size] = iter([*sizes[:1], *list(sizes) * NUM_REPEATS])
        self._next: Size | None = next(self._due, None)

    @property
    def is_done(self) -> bool:
        return self._next is None

    def time_one(self) -> float:
        """Run one step; returns its seconds."""
        assert self._next is not None, "it is done"
        seconds = self._time_step(self._next)
        self._seconds[self._next].append(seconds)
        self._left_s -= seconds
        self._next = next((size for size in self._due if self._has_time_for(size)), None)
        return seconds

    def _has_time_for(self, size: Size) -> bool:
        """Whether such a step fits what is left, by the largest that was timed of no more tokens.

        Time in proportion to tokens is the most that more of them can take.
        """
        if self._left_s <= 0.0:
            return False
        _, num_tokens = size
        smaller = [timed for timed in self._seconds if timed[1] <= num_tokens]
        nearest = max(smaller, key=lambda timed: timed[1], default=None)
        if nearest is None:
            return True
        return self._seconds[nearest][-1] * num_tokens / nearest[1] <= self._left_s

    @property
    def times(self) -> tuple[StepTime, ...]:
        """For each size the fastest step of that size, or of a larger one.

        What else the machine does only adds to a step's time, so the least is nearest to the truth.
        """
        return tuple(
            StepTime(
                num_sequences=num_sequences,
                num_tokens=num_tokens,
                seconds=min(
                    min(seconds)
                    for size, seconds in self._seconds.items()
                    if size[0] >= num_sequences and size[1] >= num_tokens
                ),
            )
            for num_sequences, num_tokens in sorted(self._seconds)
        )
