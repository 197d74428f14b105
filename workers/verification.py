"""How drafts are judged: by the target's own tokens (coupled verification).

The target samples its own token at every position; a draft is accepted iff it is that token. No
draft law is needed, so any drafter, any gamma and any stale or truncated draft is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    tokens: tuple[int, ...]
    """The accepted drafts and the target's next token: 1 to gamma + 1 tokens."""
    num_accepted: int
    num_tested: int


def judge(draft_tokens: Sequence[int], target_tokens: Sequence[int]) -> Verdict:
    """Accept the leading drafts that match.

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
