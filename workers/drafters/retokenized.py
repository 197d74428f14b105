"""Drafting with another tokenizer by way of the text (SLEM).

The method is the string-level exact match of Timor et al. 2025, arXiv:2502.05202.
The committed text is cut by the draft's tokenizer, and drafts by the target's. Where a text goes on
the cut before may change, so a few tokens are looked back at, and what is cut alike stays.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from workers.drafters.histories import History
from workers.spelling import NO_UTF_8, Cut, Encoder
from workers.token_map import TokenMap

LOOK_BEHIND = 10
"""Tokens before a change that are cut anew with it. A tokenizer's cut seldom depends on more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Where a text begins that is cut as a whole: at the start, and behind each special token."""

    num_tokens: int
    num_drafts: int
    start: int
    """Where that text begins, in bytes."""


class TextHistory(History):
    """The draft's tokens are those of its own tokenizer for the whole text.

    Special tokens are no text: they become the draft's, or nothing, and are never cut or merged.
    """

    num_unsettled = LOOK_BEHIND

    def __init__(self, token_map: TokenMap, *, target: Encoder, draft: Encoder) -> None:
        super().__init__(token_map)
        self._target, self._draft = target, draft
        self._text = bytearray()
        self._ends: list[int] = []
        """Where each of the target's tokens ends in the text, in bytes."""
        self._draft_ends = [0] * len(self.draft_tokens)
        self._runs = [_Run(num_tokens=0, num_drafts=len(self.draft_tokens), start=0)]

    def _truncate(self, num_tokens: int) -> None:
        while self._runs[-1].num_tokens > num_tokens:
            self._runs.pop()
        del self._text[self._ends[num_tokens - 1] if num_tokens else 0 :]
        draft_len = self.draft_len(num_tokens)
        for of_target in (self.given, self._ends, self._draft_lens):
            del of_target[num_tokens:]
        for of_draft in (self.draft_tokens, self._draft_ends):
            del of_draft[draft_len:]
        self._changed_from = draft_len

    def _append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            spelling = self._map.target.bytes_of.get(token)
            if spelling is None:
                self._append_special(token)
                continue
            self._text += spelling
            self.given.append(token)
            self._ends.append(len(self._text))
        self._cut()

    def _append_special(self, token: int) -> None:
        self._cut()
        pieces = self._map.pieces(token, is_first=not self.given)
        self.draft_tokens += pieces
        self._draft_ends += [len(self._text)] * len(pieces)
        self.given.append(token)
        self._ends.append(len(self._text))
        self._draft_lens.append(len(self.draft_tokens))
        self._runs.append(
            _Run(
                num_tokens=len(self.given),
                num_drafts=len(self.draft_tokens),
                start=len(self._text),
            )
        )

    def _cut(self) -> None:
        """Cut what is new of the text, and a little before it anew."""
        run = self._runs[-1]
        first = max(run.num_drafts, len(self.draft_tokens) - LOOK_BEHIND)
        start = self._draft_ends[first - 1] if first > run.num_drafts else run.start
        num_counted = min(len(self._draft_lens), bisect_right(self._ends, start))
        is_beginning = first == run.num_drafts
        cut = self._draft.encode(bytes(self._text[start:]), start, is_beginning=is_beginning)
        first, cut = self._where_cuts_meet(first, cut)
        old = self.draft_tokens[first:]
        new = [token for token, _ in cut]
        num_alike = next(
            (i for i, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]),
            min(len(old), len(new)),
        )
        self._changed_from = min(self._changed_from, first + num_alike)
        self.draft_tokens[first:] = new
        self._draft_ends[first:] = [end for _, end in cut]
        num_counted = max(run.num_tokens, num_counted)
        self._draft_lens[num_counted:] = [
            bisect_right(self._draft_ends, end, lo=run.num_drafts)
            for end in self._ends[num_counted:]
        ]

    def _where_cuts_meet(self, first: int, cut: Cut) -> tuple[int, Cut]:
        """Keep the old tokens as far as the first place where both cuts end one.

        The first tokens of a window lack what is before it: one of the text's may begin there.
        """
        old_ends = {end: first + i for i, end in enumerate(self._draft_ends[first:], start=1)}
        for index, (_, end) in enumerate(cut):
            if end in old_ends:
                return old_ends[end], cut[index + 1 :]
        return first, cut

    def to_target(
        self, drafts: Sequence[int], confidences: Sequence[float]
    ) -> tuple[list[int], list[float]]:
        """What a draft's tokens behind the history are to the target, and how sure they are.

        The target's tokens spell what was drafted, as far as it is whole characters. A token is as
        sure as the drafts that begin within it are together.
        """
        text, starts = b"", []
        last: int | None = None
        for draft in drafts:
            spelling = self._map.draft.bytes_of.get(draft)
            if spelling is None:
                last = self._map.target_of.get(draft)
                break
            starts.append(len(text))
            text += spelling
        tokens, ends = self._cut_for_target(text)
        sure = [1.0] * len(tokens)
        for start, confidence in zip(starts, confidences, strict=False):
            if (index := bisect_right(ends, start)) < len(sure):
                sure[index] *= confidence
        if last is not None and (ends[-1] if ends else 0) == len(text):
            tokens.append(last)
            sure.append(confidences[len(starts)])
        return tokens, sure

    def _cut_for_target(self, text: bytes) -> tuple[list[int], list[int]]:
        """The target's tokens for a text behind the history, and where in it each ends."""
        run, here = self._runs[-1], len(self._text)
        first = max(run.num_tokens, len(self.given) - LOOK_BEHIND)
        start = self._ends[first - 1] if first > run.num_tokens else run.start
        window = whole_characters(bytes(self._text[start:]) + text)
        text = window[here - start :]
        if not text:
            return [], []
        cut = self._target.encode(window, start, is_beginning=False)
        is_cut_here = start == here or any(end == here for _, end in cut)
        behind = [(token, end) for token, end in cut if end > here] if is_cut_here else []
        found = self._spelt(behind, text)
        if not found[0]:
            found = self._spelt(self._map.target.cut(text, here), text)
        return found

    def _spelt(self, cut: Cut, text: bytes) -> tuple[list[int], list[int]]:
        """The first tokens of a cut that spell the text and that the target can say."""
        tokens: list[int] = []
        ends = [0]
        for token, _ in cut:
            spelling = self._map.target.bytes_of[token]
            if not text.startswith(spelling, ends[-1]) or token >= self._map.target_size:
                break
            tokens.append(token)
            ends.append(ends[-1] + len(spelling))
        return tokens, ends[1:]


def whole_characters(text: bytes) -> bytes:
    """A text without the bytes at its end that are no whole character."""
    *before, last = NO_UTF_8.split(text.decode("utf-8", "surrogateescape"))
    return text if last else "".join(before[:-1]).encode("utf-8", "surrogateescape")
