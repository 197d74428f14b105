"""Which tokens two vocabularies share, and how to say the others.

A token is shared if both vocabularies have one that spells the same bytes, however they write them,
or, of special tokens, one of the same name or the same part: to end a text, or to begin it.
"""

from functools import cached_property
from typing import Any

from workers.spelling import Spelling

Tokens = tuple[int, ...]


class TokenMap:
    """From the target's token ids to those of a draft model, and back."""

    def __init__(
        self,
        target: Spelling,
        draft: Spelling,
        *,
        target_tokenizer: Any,
        draft_tokenizer: Any,
        target_size: int,
        draft_size: int,
    ) -> None:
        """`target_size`, `draft_size`: as many logits the models have."""
        self.target, self.draft = target, draft
        self.target_size, self.draft_size = target_size, draft_size
        self._target_bos = target_tokenizer.bos_token_id
        self._draft_bos = draft_tokenizer.bos_token_id
        self._adds_bos = _adds_bos(draft_tokenizer) and not _adds_bos(target_tokenizer)
        self._pieces: dict[int, Tokens] = {}
        pairs = {
            **_pair_special(target, draft, target_tokenizer, draft_tokenizer),
            **_pair_by_spelling(target, draft),
        }
        self.draft_of = {
            target_token: draft_token
            for target_token, draft_token in pairs.items()
            if target_token < target_size and draft_token < draft_size
        }
        """The shared tokens: the draft's id by the target's."""

    @cached_property
    def target_of(self) -> dict[int, int]:
        return {draft: target for target, draft in self.draft_of.items()}

    @property
    def share_of_target(self) -> float:
        """The share of the target's tokens, special ones aside, that the draft has too."""
        return self._num_shared / max(1, len(self.target.bytes_of))

    @property
    def share_of_draft(self) -> float:
        """The share of the draft's tokens, special ones aside, that the target has too."""
        return self._num_shared / max(1, len(self.draft.bytes_of))

    @cached_property
    def _num_shared(self) -> int:
        return sum(token in self.target.bytes_of for token in self.draft_of)

    @property
    def opening(self) -> Tokens:
        """What a draft's text begins with, before what the target's first token becomes: the token
        for a beginning where draft prompts have one and the target's have none."""
        return (self._draft_bos,) if self._adds_bos else ()

    def pieces(self, token: int, *, is_first: bool = False) -> Tokens:
        """A target's token as the draft says it: nothing if it is special and not shared.

        The first of a text may be the target's token for a beginning, which is the draft's then.
        """
        if is_first and token == self._target_bos:
            is_there = self._draft_bos is not None and not self._adds_bos
            return (self._draft_bos,) if is_there else ()
        pieces = self._pieces.get(token)
        if pieces is None:
            pieces = self._pieces[token] = self._cut(token)
        return pieces

    def _cut(self, token: int) -> Tokens:
        shared = self.draft_of.get(token)
        if shared is not None:
            return (shared,)
        cut = self.draft.cut(self.target.bytes_of.get(token, b""))
        return tuple(piece for piece, _ in cut if piece < self.draft_size)


def _pair_by_spelling(target: Spelling, draft: Spelling) -> dict[int, int]:
    """One token of the draft for each of the target's: of several that spell the same, the one of
    the same name, else the first that is left."""
    draft_ids = {name: token for token, name in draft.names.items()}
    pairs, taken, left = {}, set(), []
    for token, spelling in target.bytes_of.items():
        namesake = draft_ids.get(target.names[token])
        if namesake is not None and draft.bytes_of.get(namesake) == spelling:
            pairs[token] = namesake
            taken.add(namesake)
        else:
            left.append(spelling)
    for spelling in dict.fromkeys(left):
        ours = [token for token in target.ids_of.get(spelling, ()) if token not in pairs]
        theirs = [token for token in draft.ids_of.get(spelling, ()) if token not in taken]
        pairs.update(zip(ours, theirs, strict=False))
    return pairs


def _pair_special(
    target: Spelling, draft: Spelling, target_tokenizer: Any, draft_tokenizer: Any
) -> dict[int, int]:
    draft_ids = {name: token for token, name in draft.special.items()}
    pairs = {token: draft_ids[name] for token, name in target.special.items() if name in draft_ids}
    for part in ("eos_token_id", "bos_token_id"):
        ours, theirs = getattr(target_tokenizer, part), getattr(draft_tokenizer, part)
        are_special = ours in target.special and theirs in draft.special
        if are_special and ours not in pairs and theirs not in pairs.values():
            pairs[ours] = theirs
    return pairs


def _adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer begins every text with its token for a beginning."""
    return tokenizer.bos_token_id is not None and (
        tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]
    )
