"""When a worker that serves times its own steps anew, since another forward runs them now."""

from typing import Protocol

TIMING_SHARE = 0.05
"""The share of a busy worker's time that goes into a new table of step times."""


class OutdatedTable(Protocol):
    """A table of step times, as `workers.step_times.StepTable`."""

    @property
    def is_outdated(self) -> bool: ...

    def time_one_step(self) -> float: ...


class BackgroundTiming:
    """Times one step after the other: at once while nobody waits, and seldom beside calls.

    Beside calls each timed step is followed by so much work that it took TIMING_SHARE of the time:
    a call waits for one more step at most, once in a while.
    """

    def __init__(self, table: OutdatedTable) -> None:
        self._table = table
        self._next_at_s = 0.0
        """The seconds of work from which on the next step may be timed beside calls."""

    def is_due(self, *, busy_s: float, is_idle: bool) -> bool:
        """Whether a step is to be timed now.

        Args:
            busy_s: seconds that the worker has spent in steps of calls.
            is_idle: whether no call waits.
        """
        return self._table.is_outdated and (is_idle or busy_s >= self._next_at_s)

    def time_one_step(self, *, busy_s: float) -> None:
        """Time a step, which was due."""
        self._next_at_s = busy_s + self._table.time_one_step() / TIMING_SHARE
