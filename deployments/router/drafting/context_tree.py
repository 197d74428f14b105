"""Which tokens followed which contexts in a collection of texts, counted.

A context is some tokens in a row, at most MAX_MATCH_LEN, and is read backwards: the children of a
context are those with one more token before it. So all contexts in which a text ends lie on one
path from the root, and a token that is added is counted along one path. Contexts without a branch
are one edge, whose tokens are looked up in the texts: this is the suffix tree of the texts read
backwards (Weiner, 1973), cut at MAX_MATCH_LEN, with the followers of each context counted.

A token costs a walk from the root, some microseconds and never more than MAX_MATCH_LEN nodes. It
adds two nodes at most, about 300 bytes with their entries, and none where its context is known.
"""

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from typing import NamedTuple

from deployments.router.drafting.accuracy import MAX_MATCH_LEN

ROOT = 0


class Followers(NamedTuple):
    """What followed a context."""

    length: int
    """Tokens of the context."""
    token: int
    """What followed most often; of equals, what did so last."""
    times: int
    """How often that token followed."""
    total: int
    """How often any token followed."""


class ContextTree:
    """Counts what followed each context in the texts that it is given."""

    def __init__(self) -> None:
        self._text: array[int] = array("i")
        """All texts, one after the other."""
        self._text_start = 0
        """Where the last text begins: no context reaches further back."""
        self._children: dict[int, int] = {}
        """A node and the token before its context, as node << 32 | token, to the node of both."""
        # of each node: its context is the `length` tokens up to `end` in the texts
        self._ends, self._lengths = array("i", [-1]), array("i", [0])
        self._totals = array("i", [0])
        self._tokens, self._counts = array("i", [-1]), array("i", [0])
        """The most frequent follower, and its count."""
        self._others: dict[int, dict[int, int]] = {}
        """The counts of a node's other followers."""

    def __len__(self) -> int:
        """Contexts that are kept."""
        return len(self._ends)

    def begin_text(self, context: Tokens[int] = ()) -> None:
        """What is added from now on is another text; its first tokens are not counted."""
        self._text_start = len(self._text)
        self._text.extend(context)

    def extend(self, tokens: Tokens[int]) -> None:
        """Add tokens to the last text, each as the follower of the contexts before it."""
        for token in tokens:
            self._count(token)
            self._text.append(token)

    def followers(self, context: "array[int]") -> Iterator[Followers]:
        """What followed the last tokens of a context, for more and more of them.

        Numbers of tokens are passed over where one more makes no difference. Ends with the most of
        them, at most MAX_MATCH_LEN, that were ever followed by something.
        """
        node, depth = ROOT, 0
        end, limit = len(context) - 1, min(len(context), MAX_MATCH_LEN)
        while depth < limit:
            child = self._children.get(node << 32 | context[end - depth])
            if child is None:
                return
            length = self._agreement(child, depth, context, limit)
            yield Followers(length, self._tokens[child], self._counts[child], self._totals[child])
            if length < self._lengths[child]:
                return
            node, depth = child, length

    def _count(self, token: int) -> None:
        """Count a token for every context at the end of the text."""
        text, end = self._text, len(self._text) - 1
        limit = min(len(text) - self._text_start, MAX_MATCH_LEN)
        node, depth = ROOT, 0
        while depth < limit:
            key = node << 32 | text[end - depth]
            child = self._children.get(key)
            if child is None:
                self._children[key] = self._make_node(end, limit, token=token, total=1)
                return
            depth = self._agreement(child, depth, text, limit)
            node = self._split(key, child, depth) if depth < self._lengths[child] else child
            self._see(node, token)

    def _agreement(self, node: int, depth: int, tokens: "array[int]", limit: int) -> int:
        """How many tokens of a node's context are the last of `tokens`, if depth + 1 are."""
        text, end, last = self._text, self._ends[node], len(tokens) - 1
        most, length = min(self._lengths[node], limit), depth + 1
        if (
            most == length
            or text[end - most + 1 : end - depth] == tokens[last - most + 1 : last - depth]
        ):
            return most
        while text[end - length] == tokens[last - length]:
            length += 1
        return length

    def _make_node(self, end: int, length: int, *, token: int, count: int = 1, total: int) -> int:
        self._ends.append(end)
        self._lengths.append(length)
        self._totals.append(total)
        self._tokens.append(token)
        self._counts.append(count)
        return len(self._ends) - 1

    def _split(self, key: int, child: int, length: int) -> int:
        """A node for the first tokens of an edge; so far they stood where all of them did."""
        node = self._make_node(
            self._ends[child],
            length,
            token=self._tokens[child],
            count=self._counts[child],
            total=self._totals[child],
        )
        if child in self._others:
            self._others[node] = dict(self._others[child])
        self._children[key] = node
        self._children[node << 32 | self._text[self._ends[child] - length]] = child
        return node

    def _see(self, node: int, token: int) -> None:
        """Count a follower of a node."""
        self._totals[node] += 1
        if self._tokens[node] == token:
            self._counts[node] += 1
            return
        others = self._others.setdefault(node, {})
        count = others.pop(token, 0) + 1
        if count < self._counts[node]:
            others[token] = count
            return
        others[self._tokens[node]] = self._counts[node]
        self._tokens[node], self._counts[node] = token, count
