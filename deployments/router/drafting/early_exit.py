"""Early exit, as the router sees it: drafts that come with the target's answer to the last round.

The target makes them with its own first layers once it has decided a round's tokens; see
`workers.drafters.early_exit`. They are asked for with a verification: how far to draft is decided a
round ahead, and what was expected of the drafts then decides later which of them are verified.
"""

from dataclasses import dataclass

from deployments.router.drafting.protocol import sound
from deployments.router.policy.gamma import Decision
from deployments.router.sequence import Sequence
from workers.types import NO_DRAFTS, DraftTokens

SOURCE = "early_exit"


@dataclass(frozen=True, slots=True, kw_only=True)
class NextDrafts:
    """Drafts that a verification is to bring for the next round; see VerifyRequest."""

    k: int
    stop_below: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _InHand:
    drafts: DraftTokens
    decision: Decision
    """The decision by which the drafts were asked for."""
    text_len: int
    """The number of committed tokens before the drafts."""


class EarlyExit:
    """A local drafter, whose drafts the target has made: they are in hand before their round."""

    source = SOURCE

    def __init__(self) -> None:
        self._in_hand: dict[str, _InHand] = {}

    def __len__(self) -> int:
        """Sequences of which drafts are kept."""
        return len(self._in_hand)

    def draft(self, sequence: Sequence, max_tokens: int) -> DraftTokens:
        in_hand = self._in_hand.get(sequence.seq_id)
        if in_hand is None or in_hand.text_len != len(sequence.tokens):
            return NO_DRAFTS
        return sound(in_hand.drafts, source=SOURCE, max_tokens=max_tokens)

    def decision_about(self, sequence: Sequence) -> Decision:
        """The decision by which the drafts in hand were asked for."""
        return self._in_hand[sequence.seq_id].decision

    def most_ahead(self, sequence: Sequence, max_tokens: int) -> int:
        """How many drafts may be asked for with the coming verification, where a round may have
        `max_tokens`: none of a sequence that is not cached, so that its first token comes at once.
        """
        if sequence.target.cached_len == 0:
            return 0
        # this round commits a token, and the last one needs no draft
        return max(0, min(max_tokens, sequence.num_remaining - 2))

    def keep(self, sequence: Sequence, drafts: DraftTokens, decision: Decision) -> None:
        """Take drafts for the next round, which were asked for by that decision."""
        if drafts.tokens and not sequence.is_done:
            self._in_hand[sequence.seq_id] = _InHand(
                drafts=drafts, decision=decision, text_len=len(sequence.tokens)
            )

    def forget(self, sequence: Sequence) -> None:
        self._in_hand.pop(sequence.seq_id, None)
