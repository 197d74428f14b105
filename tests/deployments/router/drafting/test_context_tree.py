"""The tree of contexts against a count of every place, and what it costs."""

import random
import tracemalloc
from array import array
from collections import Counter
from collections.abc import Sequence

import pytest

from deployments.router.drafting.accuracy import MAX_MATCH_LEN
from deployments.router.drafting.context_tree import ContextTree, Followers

BYTES_PER_TOKEN = 360
"""What docs/drafting.md says."""


def draw_texts(rng: random.Random) -> list[list[int]]:
    """Texts of a small alphabet, so that most contexts stand in several places."""
    alphabet = range(rng.choice([1, 2, 3, 10]))
    return [rng.choices(alphabet, k=rng.randrange(40)) for _ in range(rng.randrange(5))]


def draw_context(rng: random.Random, texts: Sequence[Sequence[int]]) -> list[int]:
    """The beginning of a text, or anything."""
    if texts and rng.random() < 0.5:
        text = rng.choice(texts)
        return list(text[: rng.randrange(len(text) + 1)])
    return rng.choices(range(4), k=rng.randrange(MAX_MATCH_LEN + 4))


def tree_of(texts: Sequence[Sequence[int]]) -> ContextTree:
    tree = ContextTree()
    for text in texts:
        tree.begin_text()
        tree.extend(text)
    return tree


def count(texts: Sequence[Sequence[int]], context: Sequence[int]) -> Followers | None:
    """What followed a context, by looking at every place."""
    length = len(context)
    seen = [
        text[end]
        for text in texts
        for end in range(length, len(text))
        if list(text[end - length : end]) == list(context)
    ]
    if not seen:
        return None
    counts = Counter(seen)
    most = max(counts.values())
    (token, *_) = [token for token in reversed(seen) if counts[token] == most]
    return Followers(length, token, most, len(seen))


def check(tree: ContextTree, texts: Sequence[Sequence[int]], context: Sequence[int]) -> None:
    """Every end of a context has the followers that a count of all places finds."""
    found = list(tree.followers(array("i", context)))
    longest = 0
    for length in range(1, min(len(context), MAX_MATCH_LEN) + 1):
        expected = count(texts, context[len(context) - length :])
        if expected is None:
            break
        longest = length
        # lengths that are passed over have the followers of the next one that is not
        (same, *_) = [each for each in found if each.length >= length]
        assert same[1:] == expected[1:]
    assert max((each.length for each in found), default=0) == longest


def test_it_counts_what_followed_each_context(pytestconfig: pytest.Config) -> None:
    for seed in range(pytestconfig.getoption("--cases")):
        rng = random.Random(seed)
        texts = draw_texts(rng)
        tree = tree_of(texts)
        for _ in range(4):
            check(tree, texts, draw_context(rng, texts))


def test_no_context_reaches_over_the_beginning_of_a_text() -> None:
    tree = tree_of([[1, 2], [3, 4]])
    assert not list(tree.followers(array("i", [2])))
    assert [found.length for found in tree.followers(array("i", [2, 3]))] == [1]


def test_tokens_before_a_text_are_contexts_and_are_not_counted() -> None:
    tree = ContextTree()
    tree.begin_text([1, 2, 3])
    tree.extend([4])
    assert not list(tree.followers(array("i", [1, 2])))
    (found,) = tree.followers(array("i", [1, 2, 3]))
    assert found == Followers(3, 4, 1, 1)


def test_its_memory_is_bounded_by_its_tokens() -> None:
    rng = random.Random(0)
    for text in (
        rng.choices(range(30_000), k=8_000),
        rng.choices(range(50), k=8_000),
        [token // 2 for token in range(8_000)],
    ):
        tracemalloc.start()
        tree = tree_of([text])
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert size < BYTES_PER_TOKEN * len(text)
        assert len(tree) <= 2 * len(text)


def test_what_is_known_takes_no_memory_again() -> None:
    text = random.Random(0).choices(range(1000), k=500)
    once, often = tree_of([text]), tree_of([text] * 20)
    # at the end of the text contexts are new: nothing has followed them yet
    assert len(often) <= len(once) + 2 * MAX_MATCH_LEN
