"""Judging drafts by the target's own tokens."""

import itertools
from fractions import Fraction

import pytest

from workers.verification import accept_matching


@pytest.mark.parametrize(
    ("draft_tokens", "target_tokens", "tokens", "num_accepted", "num_tested"),
    [
        ((), (7,), (7,), 0, 0),
        ((5,), (5, 6), (5, 6), 1, 1),
        ((5,), (4, 6), (4,), 0, 1),
        ((1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4), 3, 3),
        ((1, 2, 3), (1, 9, 3, 4), (1, 9), 1, 2),
        # a later match after a rejection counts for nothing
        ((1, 2, 3), (9, 2, 3, 4), (9,), 0, 1),
    ],
)
def test_leading_matches_are_accepted(
    draft_tokens: tuple[int, ...],
    target_tokens: tuple[int, ...],
    tokens: tuple[int, ...],
    num_accepted: int,
    num_tested: int,
) -> None:
    verdict = accept_matching(draft_tokens, target_tokens)
    assert verdict.tokens == tokens
    assert (verdict.num_accepted, verdict.num_tested) == (num_accepted, num_tested)


@pytest.mark.parametrize("gamma", [0, 1, 2, 3])
def test_emitted_law_is_the_targets_by_enumeration(gamma: int) -> None:
    """Exact fractions over three tokens: whatever the drafts, the text has the target's law.

    The target's token at a position depends on the tokens before it, through its own noise; here
    every combination of its choices is enumerated with its probability.
    """
    vocab = range(3)
    length = gamma + 1

    def law(prefix: tuple[int, ...], token: int) -> Fraction:
        weights = [1 + (sum(prefix) + 2 * v + len(prefix)) % 4 for v in vocab]
        return Fraction(weights[token], sum(weights))

    for drafts in itertools.product(vocab, repeat=gamma):
        emitted: dict[tuple[int, ...], Fraction] = {}
        for target in itertools.product(vocab, repeat=length):
            probability = Fraction(1)
            for index, token in enumerate(target):
                probability *= law(drafts[:index], token)
            tokens = accept_matching(drafts, target).tokens
            emitted[tokens] = emitted.get(tokens, Fraction(0)) + probability
        for tokens, probability in emitted.items():
            expected = Fraction(1)
            for index, token in enumerate(tokens):
                expected *= law(tokens[:index], token)
            assert probability == expected
        assert sum(emitted.values()) == 1
