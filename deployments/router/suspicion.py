"""Which sequence ends the workers that run it. Pure.

A worker that ends while it runs a round does not say who is to blame: every sequence of the round
is suspected, until it makes progress elsewhere. A worker whose step has failed says at least that
the blame is within that step. Sequences that are suspected enough go on one at a time. One whose
step fails then has made it fail, and fails itself instead of moving to another worker. A worker
that ends without a word (a signal, the machine) may still have been ended by others, so it takes
two of these.

So a sequence that makes steps fail costs two workers, and one that ends them without a word costs
four at most; so does one that fails the steps of groups, which fail too when a rank is lost. One
that only stood beside others' misfortune is given up if it loses that many in a row.
"""

from dataclasses import dataclass

ENOUGH = 2
"""The weight of one failed step, or of two silent losses: a sequence that has it runs by itself,
and is to blame for as much again."""


@dataclass(slots=True, kw_only=True)
class Suspicion:
    """How far one sequence is suspected."""

    weight: int = 0

    @property
    def is_enough(self) -> bool:
        """Whether the sequence may be run by itself only."""
        return self.weight >= ENOUGH

    def add(self, *, is_by_step: bool) -> bool:
        """A round of the sequence has brought no answer; returns whether it is to blame.

        Args:
            is_by_step: whether a step or a call failed by what it carried, not just a process.
        """
        limit = 2 * ENOUGH if self.is_enough else ENOUGH
        self.weight = min(limit, self.weight + (ENOUGH if is_by_step else 1))
        return self.weight == 2 * ENOUGH

    def clear(self) -> None:
        """The sequence has made progress."""
        self.weight = 0
