"""What is committed of a sequence, in the target's tokens and in those of a draft model.

Whoever asks a drafter speaks of the target's tokens only, so a drafter with another vocabulary
keeps both, and which of its own belong to which of the target's. It is soft state, like its cache.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import takewhile

from workers.token_map import TokenMap


class History(ABC):
    """The tokens of one sequence in both vocabularies."""

    num_unsettled: int
    """How many of the draft's last tokens may be others once the text goes on."""

    def __init__(self, token_map: TokenMap) -> None:
        self._map = token_map
        self.given: list[int] = []
        """The target's tokens, committed and assumed."""
        self.drafted: list[int] = []
        """The tokens that were drafted behind `given`, in the target's tokens, as far as known."""
        self.draft_tokens: list[int] = list(token_map.opening)
        """The text of `given` in the draft's tokens, or as much of it as the draft can say."""
        self.committed_len = 0
        """How many tokens of `given` are committed; the others are assumed."""
        self._draft_lens: list[int] = []
        """For each token of `given`, how many of the draft's tokens say the text up to its end."""
        self._changed_from = 0

    @property
    def tokens(self) -> list[int]:
        """All tokens of the sequence in the target's vocabulary, drafts included."""
        return self.given + self.drafted

    def update(self, base_len: int, given: Sequence[int], *, num_assumed: int = 0) -> int:
        """Have the first `base_len` of the target's tokens be followed by those given, the last of
        which are only assumed.

        Returns how many of the draft's tokens are as they were. What is done grows with what is
        new, not with the text.
        """
        assert base_len <= len(self.given)
        known = zip(self.given[base_len:], given, strict=False)
        num_alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], known))
        self._changed_from = len(self.draft_tokens)
        if base_len + num_alike < len(self.given):
            self._truncate(base_len + num_alike)
        self._append(given[num_alike:])
        self.committed_len = len(self.given) - num_assumed
        return min(self._changed_from, len(self.draft_tokens))

    def draft_len(self, num_tokens: int) -> int:
        """How many of the draft's tokens say the first `num_tokens` of the target's."""
        return self._draft_lens[num_tokens - 1] if num_tokens else len(self._map.opening)

    def num_said(self, draft_len: int) -> int:
        """How many of the target's tokens the first `draft_len` of the draft's say."""
        return bisect_right(self._draft_lens, draft_len) if draft_len else 0

    @abstractmethod
    def _truncate(self, num_tokens: int) -> None:
        """Forget the target's tokens from `num_tokens` on."""

    @abstractmethod
    def _append(self, tokens: Sequence[int]) -> None:
        """Take in more of the target's tokens."""


class PieceHistory(History):
    """Every token by itself: a shared one as the draft's, any other as shorter ones.

    The draft's text is cut where the target's is, so nothing changes once it is said.
    """

    num_unsettled = 0

    def _truncate(self, num_tokens: int) -> None:
        del self.draft_tokens[self.draft_len(num_tokens) :]
        del self.given[num_tokens:]
        del self._draft_lens[num_tokens:]
        self._changed_from = len(self.draft_tokens)

    def _append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.draft_tokens += self._map.pieces(token, is_first=not self.given)
            self.given.append(token)
            self._draft_lens.append(len(self.draft_tokens))
