"""Which sequence ends the workers that run it. Pure.

A worker that ends while it runs a round does not say who is to blame: every sequence of the round
is suspected, until it makes progress elsewhere. A worker whose step has failed says at least that
the blame is within that step. Sequences that are suspected enough go on one at a time, so that a
worker that ends then has ended by that one sequence, which fails instead of moving to another.

So a sequence that makes steps fail costs two workers (three groups of ranks, whose steps fail too
when a rank is lost), and one that ends them without a word (a signal, the machine) three at most.
One that only stood beside others' misfortune is given up if it loses that many in a row.
"""

from dataclasses import dataclass

ENOUGH = 2
"""The weight from which a sequence runs by itself: one failed step, or two silent losses."""


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
        is_to_blame = self.is_enough
        self.weight += ENOUGH if is_by_step else 1
        return is_to_blame

    def clear(self) -> None:
        """The sequence has made progress."""
        self.weight = 0
