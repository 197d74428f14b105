"""What has become of the drafts of one sequence, or of several."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

from deployments.router.policy.gamma import Outcome


@dataclass(slots=True, kw_only=True)
class SpeculationCounts:
    """Counts of a sequence's drafts; those tested and accepted count as far as its text goes."""

    num_rounds: int = 0
    """Rounds in which drafts of it were tested."""
    num_draft_tokens: int = 0
    num_tested: int = 0
    num_accepted: int = 0
    num_committed: int = 0
    """Tokens that these rounds added to the text."""
    accepted_by_position: list[int] = field(default_factory=list)
    """How often the first, the second and so on of a round's drafts was accepted."""

    @property
    def tokens_per_verify(self) -> float | None:
        """Mean tokens that a round with drafts added (tau); None before the first."""
        return self.num_committed / self.num_rounds if self.num_rounds else None

    @classmethod
    def total(cls, parts: Iterable["SpeculationCounts"]) -> "SpeculationCounts":
        """The counts of several sequences together."""
        parts = list(parts)
        accepted = zip_longest(*(part.accepted_by_position for part in parts), fillvalue=0)
        return cls(
            num_rounds=sum(part.num_rounds for part in parts),
            num_draft_tokens=sum(part.num_draft_tokens for part in parts),
            num_tested=sum(part.num_tested for part in parts),
            num_accepted=sum(part.num_accepted for part in parts),
            num_committed=sum(part.num_committed for part in parts),
            accepted_by_position=[sum(position) for position in accepted],
        )

    def add(self, outcome: Outcome) -> None:
        """Count a round."""
        num_accepted = outcome.num_accepted_in_text
        self.num_rounds += 1
        self.num_draft_tokens += outcome.num_draft_tokens
        self.num_tested += outcome.num_tested_in_text
        self.num_accepted += num_accepted
        self.num_committed += outcome.num_committed
        missing = num_accepted - len(self.accepted_by_position)
        self.accepted_by_position += [0] * missing
        for position in range(num_accepted):
            self.accepted_by_position[position] += 1
