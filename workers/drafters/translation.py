"""The two ways to draft for a target with another tokenizer.

Both choose among the draft's logits where the target has its own: a shared token stands at the
target's id. So it gets the noise that the target adds to it, and its biases and penalties, and
sampled drafts agree with the target as often as those of its own vocabulary would.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

from workers.drafters.histories import History, PieceHistory
from workers.drafters.retokenized import TextHistory
from workers.model_source import AnyModel
from workers.spelling import Encoder
from workers.token_map import TokenMap

NO_TOKEN = -1
"""Stands for the draft's token in columns of tokens that it does not have."""


class Translation(ABC):
    """A way from what a draft model says to what its target would say."""

    has_grammars: bool
    """Whether what a grammar of the target allows can be told of the columns."""
    has_laws: bool
    """Whether the law of a column is that of a token of the target."""

    def __init__(self, token_map: TokenMap, *, target: AnyModel) -> None:
        """`target`: the model's id or folder."""
        self._map = token_map
        self.target = target

    @property
    def target_size(self) -> int:
        return self._map.target_size

    @cached_property
    def columns(self) -> list[int]:
        """The draft's token in each column: the target's ids, then those that only the
        draft has."""
        return [self._map.draft_of.get(token, NO_TOKEN) for token in range(self.target_size)]

    @abstractmethod
    def begin(self) -> History:
        """The history of a new sequence."""

    @abstractmethod
    def note(self, drafted: list[int], column: int) -> None:
        """Add what was sampled to what was drafted before it, in the target's tokens."""

    @abstractmethod
    def answer(
        self, history: History, drafts: Sequence[int], confidences: Sequence[float]
    ) -> tuple[Sequence[int], Sequence[float]]:
        """The draft's tokens behind a history in the target's tokens, and how sure they are."""


class Intersection(Translation):
    """Drafts of shared tokens only (TLI: Timor et al. 2025, arXiv:2502.05202)."""

    has_grammars = has_laws = True

    def begin(self) -> PieceHistory:
        return PieceHistory(self._map)

    def note(self, drafted: list[int], column: int) -> None:
        drafted.append(column)

    def answer(
        self,
        history: History,
        drafts: Sequence[int],  # noqa: ARG002
        confidences: Sequence[float],
    ) -> tuple[Sequence[int], Sequence[float]]:
        return history.drafted, confidences


class Retokenizing(Translation):
    """Drafts of all tokens, whose text the target's tokenizer cuts."""

    has_grammars = has_laws = False  # of the target's cut, which is not known while drafting

    def __init__(self, token_map: TokenMap, *, target: AnyModel) -> None:
        super().__init__(token_map, target=target)
        self._target_encoder = Encoder(token_map.target)
        self._draft_encoder = Encoder(token_map.draft)

    @cached_property
    def columns(self) -> list[int]:
        spellings = self._map.draft.bytes_of
        unshared = [
            token
            for token in range(self._map.draft_size)
            if spellings.get(token) and token not in self._map.target_of
        ]
        return super().columns + unshared

    def begin(self) -> TextHistory:
        return TextHistory(self._map, target=self._target_encoder, draft=self._draft_encoder)

    def note(self, drafted: list[int], column: int) -> None:
        """Guess the target's cut so far: what makes one token with the last one is one with it."""
        target = self._map.target
        spelling = self._map.draft.bytes_of.get(self.columns[column], b"")
        before = target.bytes_of.get(drafted[-1], b"") if drafted else b""
        together = target.ids_of.get(before + spelling) if before and spelling else None
        if together is not None:
            drafted[-1] = together[0]
        elif column < self.target_size:
            drafted.append(column)
        else:
            drafted += [token for token, _ in target.cut(spelling)]

    def answer(
        self, history: History, drafts: Sequence[int], confidences: Sequence[float]
    ) -> tuple[Sequence[int], Sequence[float]]:
        assert isinstance(history, TextHistory)
        return history.to_target(drafts, confidences)
