"""The laws that drafts are drawn from: what is drawn is what is sent."""

from collections import Counter

import numpy as np
import pytest
import torch

from workers.draft_law import LARGEST_WEIGHT, MAX_TOKENS, DraftLaw, draft_laws, read_law, read_laws
from workers.streams import Stream, random_bits, uniform


def make_law(*pairs: tuple[int, int]) -> DraftLaw:
    tokens, weights = zip(*pairs, strict=True)
    return DraftLaw(tokens=np.array(tokens), weights=np.array(weights))


def shares_of(law: DraftLaw) -> dict[int, float]:
    return dict(zip(law.tokens.tolist(), law.probabilities.tolist(), strict=True))


def test_a_law_arrives_as_it_was_sent() -> None:
    law = make_law((2**32 - 1, 1), (0, LARGEST_WEIGHT), (7, 300))
    packed = law.pack()
    assert len(packed) == 3 * 6
    assert shares_of(read_law(packed, 7)) == shares_of(law)


def test_tokens_are_drawn_by_their_weights() -> None:
    """Evenly spaced numbers hit every token as often as it weighs."""
    law = make_law((5, 1), (3, 4), (8, 3))
    drawn = Counter(law.draw(number << 61) for number in range(8))
    assert drawn == {5: 1, 3: 4, 8: 3}
    assert law.draw(2**64 - 1) == 8


def test_the_likeliest_tokens_are_kept_in_their_proportions() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(0)) * 2
    (law,) = draft_laws(logits)
    assert law is not None
    shares = shares_of(law)
    kept = logits[0].topk(MAX_TOKENS).indices.tolist()
    assert sorted(shares) == sorted(kept)
    whole = logits[0].double().softmax(-1)
    expected = whole[kept] / whole[kept].sum()
    assert [shares[token] for token in kept] == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_token_without_a_chance_is_none_of_the_law() -> None:
    logits = torch.tensor([[0.0, -float("inf"), 1.0, -40.0]])
    (law,) = draft_laws(logits)
    assert law is not None
    assert law.tokens.tolist() == [2, 0]


@pytest.mark.parametrize("highest", [float("nan"), float("inf"), -float("inf")])
def test_a_row_without_a_finite_highest_score_has_no_law(highest: float) -> None:
    logits = torch.full((2, 5), -float("inf"))
    logits[0, 2], logits[1, 3] = highest, 0.0
    nothing, law = draft_laws(logits)
    assert nothing is None
    assert law is not None
    assert law.tokens.tolist() == [3]


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"abc",
        make_law((1, 2), (2, 3)).pack(),  # of another token
        make_law((7, 2), (7, 3)).pack(),
        make_law((7, 0), (2, 3)).pack(),
    ],
)
def test_what_cannot_be_a_tokens_law_makes_it_certain(packed: bytes) -> None:
    assert shares_of(read_law(packed, 7)) == {7: 1.0}


def test_laws_that_are_not_one_for_each_token_count_for_none() -> None:
    law = make_law((7, 2), (3, 2)).pack()
    assert [shares_of(read) for read in read_laws((law,), (7, 3))] == [{7: 1.0}, {3: 1.0}]
    assert [shares_of(read) for read in read_laws((law, b""), (7, 4))] == [
        {7: 0.5, 3: 0.5},
        {4: 1.0},
    ]


def test_streams_positions_rounds_and_seeds_have_numbers_of_their_own() -> None:
    numbers = {
        random_bits(seed, position, stream=stream, round_len=round_len)
        for seed in (-1, 0, 1, 2**63 - 1)
        for position in range(8)
        for stream in Stream
        for round_len in range(8)
    }
    assert len(numbers) == 4 * 8 * 2 * 8
    assert all(0 <= number < 2**64 for number in numbers)


def test_uniform_numbers_are_uniform_and_below_one() -> None:
    numbers = [uniform(3, i, stream=Stream.ACCEPTANCE, round_len=0) for i in range(20_000)]
    counts = np.histogram(numbers, bins=20, range=(0.0, 1.0))[0]
    assert counts.sum() == 20_000
    assert ((counts - 1000) ** 2 / 1000).sum() < 44  # of 19 degrees of freedom, p is 0.001
    assert uniform(3, 5, stream=Stream.DRAFT, round_len=0) != numbers[5]
