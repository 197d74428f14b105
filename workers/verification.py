"""How drafts are judged: the rules by which a target accepts them.

Coupled verification, the rule by default: the target samples its own token at every position, and a
draft is accepted iff it is that token. No draft law is needed, so any drafter, any gamma and any
stale or truncated draft is exact, and a text is that of its seed. The other rules, which compare
the target's law with the drafter's, are in `rejection` and `block_verification`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from workers.sampling import SamplingRow, sample
from workers.types import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRun:
    """The drafts of one sequence, and what decides the target's own tokens beside the logits."""

    draft_tokens: tuple[int, ...]
    """The drafts.  # [gamma]"""
    rows: tuple[SamplingRow, ...]
    """What decides the token at each draft's position and behind them all.  # [gamma + 1]"""
    rule: Rule = "coupled"
    draft_laws: tuple[bytes, ...] = ()
    """See DraftTokens.  # [gamma], or none"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a rule makes of a sequence's drafts."""

    tokens: tuple[int, ...]
    """The accepted drafts and the target's next token: 1 to gamma + 1 tokens. The last is NO_TOKEN
    where the scores decide none."""
    num_accepted: int
    num_tested: int

    def before_last(self) -> "Verdict":
        """The verdict without its last token: the last accepted draft is the target's own then."""
        num_accepted = self.num_accepted - 1
        return Verdict(tokens=self.tokens[:-1], num_accepted=num_accepted, num_tested=num_accepted)


class VerificationRule(Protocol):
    """Decides which drafts become part of the text."""

    def judge(self, logits: Tensor, runs: Sequence[JudgedRun]) -> list[Verdict]:
        """A verdict for each run.

        Shapes: logits [sum(gamma + 1), vocab], the rows of the runs one after the other.
        """
        ...


class CoupledRule:
    """Accepts the drafts that the target samples itself, with noise that a drafter can share."""

    def judge(self, logits: Tensor, runs: Sequence[JudgedRun]) -> list[Verdict]:
        """See VerificationRule."""
        tokens = iter(sample(logits, [row for run in runs for row in run.rows]))
        return [accept_matching(run.draft_tokens, [next(tokens) for _ in run.rows]) for run in runs]


def accept_matching(draft_tokens: Sequence[int], target_tokens: Sequence[int]) -> Verdict:
    """Accept the leading drafts that are the target's own tokens.

    `target_tokens[i]` is the target's token at the position of draft i, given the drafts before
    it; the last one follows all drafts.  # [gamma], [gamma + 1]
    """
    assert len(target_tokens) == len(draft_tokens) + 1
    num_accepted = 0
    while (
        num_accepted < len(draft_tokens)
        and draft_tokens[num_accepted] == target_tokens[num_accepted]
    ):
        num_accepted += 1
    return Verdict(
        tokens=tuple(target_tokens[: num_accepted + 1]),
        num_accepted=num_accepted,
        num_tested=min(num_accepted + 1, len(draft_tokens)),
    )
