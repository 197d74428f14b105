"""What is kept of finished texts, for the drafts of later ones: bounded, the oldest are dropped.

Texts are shared by sequences of one tenant and cache salt only: what another client is drafted
would tell of them by its response times. They are read into context trees bit by bit, while the
target computes, so that a long text holds up no round.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from deployments.router.drafting.accuracy import MAX_MATCH_LEN
from deployments.router.drafting.context_tree import ContextTree

MAX_TOKENS = 2**18
"""Tokens of all texts that are kept, or wait to be: less than 100 MB. A quarter of them may wait,
and a quarter is the longest text."""
READ_AT_ONCE = 256
"""Tokens that are read in a round: some two milliseconds."""
SHELF_TOKENS = 16
"""Tokens that take as much memory as an empty tree."""
KNOWN_LEN = 64
"""A text that begins as an earlier one, as each turn of a chat does, is not counted again: it is
compared in steps of so many tokens."""

Share = tuple[str, str]
"""A tenant's name and a cache salt."""


@dataclass(slots=True, eq=False)
class _Shelf:
    """Some texts of a share, and what they count against MAX_TOKENS."""

    tree: ContextTree = field(default_factory=ContextTree)
    known: set[int] = field(default_factory=set)
    """Hashes of the beginnings of its texts."""
    num_tokens: int = SHELF_TOKENS

    def place(self, text: "array[int]") -> int:
        """Begin a text; returns from which token on it has to be read."""
        value, start = 0, 0
        for end in range(KNOWN_LEN, len(text) + 1, KNOWN_LEN):
            value = hash((value, text[end - KNOWN_LEN : end].tobytes()))
            if value in self.known and start == end - KNOWN_LEN:
                start = end
            self.known.add(value)
        context = text[max(0, start - MAX_MATCH_LEN) : start]
        self.tree.begin_text(context)
        self.num_tokens += len(text) - start + len(context)
        return start


class FinishedTexts:
    """The finished texts of a router, by who may draft from them."""

    def __init__(self, *, max_tokens: int = MAX_TOKENS) -> None:
        self._max_kept = max_tokens * 3 // 4
        self._max_len = max_tokens // 4
        """The most tokens of a text, of all that wait, and of a shelf that takes one more."""
        self._shelves: OrderedDict[Share, list[_Shelf]] = OrderedDict()
        """The share that was added to last is last, and so is its newest shelf."""
        self._num_tokens = 0
        self._waiting: deque[tuple[Share, array[int]]] = deque()
        self._num_waiting = 0
        self._reading: tuple[ContextTree, array[int], int] | None = None
        """The text that is read, and up to where it has been."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept, waiting ones included."""
        return self._num_tokens + self._num_waiting

    def trees(self, share: Share) -> list[ContextTree]:
        """What may be drafted from, at most three trees."""
        return [shelf.tree for shelf in self._shelves.get(share, ())]

    def add(self, share: Share, tokens: Tokens[int]) -> None:
        """Keep a text; of a very long one the end."""
        text = array("i", tokens[-self._max_len :])
        self._waiting.append((share, text))
        self._num_waiting += len(text)
        while self._num_waiting > self._max_len:
            self._take()

    def read(self, num_tokens: int = READ_AT_ONCE) -> None:
        """Go on reading the texts that wait."""
        while num_tokens > 0 and (self._reading is not None or self._waiting):
            tree, text, start = self._reading or self._place(*self._take())
            part = text[start : start + num_tokens]
            tree.extend(part)
            num_tokens -= max(1, len(part))
            end = start + len(part)
            self._reading = (tree, text, end) if end < len(text) else None

    def _take(self) -> tuple[Share, "array[int]"]:
        """The text that has waited for longest."""
        share, text = self._waiting.popleft()
        self._num_waiting -= len(text)
        return share, text

    def _place(self, share: Share, text: "array[int]") -> tuple[ContextTree, "array[int]", int]:
        """Find a shelf for a text, and drop shelves that there is no more room for."""
        shelves = self._shelves.setdefault(share, [])
        self._shelves.move_to_end(share)
        if not shelves or shelves[-1].num_tokens > self._max_len:
            shelves.append(_Shelf())
            self._num_tokens += SHELF_TOKENS
        shelf = shelves[-1]
        before = shelf.num_tokens
        start = shelf.place(text)
        self._num_tokens += shelf.num_tokens - before
        while self._num_tokens > self._max_kept:
            self._drop_oldest()
        return shelf.tree, text, start

    def _drop_oldest(self) -> None:
        share, shelves = next(iter(self._shelves.items()))
        self._num_tokens -= shelves.pop(0).num_tokens
        if not shelves:
            del self._shelves[share]
