"""`python -m cluster bench traffic`: how gamma=dynamic follows a text that changes.

One stream; the text goes from easy to hard and back to easy under one controller, which is told
nothing of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

from cluster.bench.report import markdown_table

TEXTS = ("easy", "hard", "easy")
NEAR = 1.0
"""Drafts of a phase's settled length that count as having arrived."""
WINDOW = 10
"""Rounds over which the length is averaged to say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What was measured while the text was of one kind."""

    text: str
    tokens_per_s: float
    alpha: float
    gammas: tuple[float, ...]
    """The mean draft length chosen in each round."""

    @property
    def settled_gamma(self) -> float:
        """Of the second half."""
        return mean(self.gammas[len(self.gammas) // 2 :])

    @property
    def num_rounds_to_settle(self) -> int:
        """After how many rounds the length first came near the settled one."""
        for end in range(min(WINDOW, len(self.gammas)), len(self.gammas)):
            if abs(mean(self.gammas[max(0, end - WINDOW) : end]) - self.settled_gamma) <= NEAR:
                return end
        return len(self.gammas)


def format_table(phases: Sequence[Phase]) -> str:
    """The phases as a Markdown table."""
    columns: dict[str, Callable[[Phase], str]] = {
        "text": lambda phase: phase.text,
        "rounds": lambda phase: str(len(phase.gammas)),
        "tokens/s": lambda phase: f"{phase.tokens_per_s:.1f}",
        "alpha": lambda phase: f"{phase.alpha:.3f}",
        "settled draft length": lambda phase: f"{phase.settled_gamma:.1f}",
        "rounds until there": lambda phase: str(phase.num_rounds_to_settle),
    }
    return markdown_table(columns, phases)
