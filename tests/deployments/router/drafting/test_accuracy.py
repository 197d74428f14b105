"""The measured rates of guesses."""

import random

import pytest

from deployments.router.drafting.accuracy import (
    MANY_PLACES,
    MAX_MATCH_LEN,
    SURE,
    Guess,
    MatchAccuracy,
    expected_len,
    is_sure,
)
from workers.types import NO_DRAFTS, DraftTokens


def drafts_of(*confidences: float) -> DraftTokens:
    return DraftTokens(tokens=(1,) * len(confidences), confidences=confidences)


class TestMatchAccuracy:
    def test_longer_matches_and_more_places_are_surer_up_to_a_bound(self) -> None:
        accuracy = MatchAccuracy()
        by_length = [accuracy.of(Guess(1, length)) for length in range(MAX_MATCH_LEN + 2)]
        assert by_length == sorted(by_length)
        assert by_length[MAX_MATCH_LEN] == by_length[MAX_MATCH_LEN + 1]
        by_places = [accuracy.of(Guess(1, 3, number)) for number in range(1, MANY_PLACES + 2)]
        assert by_places[0] < by_places[MANY_PLACES - 2] < by_places[MANY_PLACES - 1]
        assert by_places[MANY_PLACES - 1] == by_places[MANY_PLACES]

    def test_a_head_start_is_as_if_more_had_agreed(self) -> None:
        assert MatchAccuracy().of(Guess(1, 0)) == 0.0
        for length in range(5):
            ahead = MatchAccuracy(head_start=1).of(Guess(1, length))
            assert ahead == MatchAccuracy().of(Guess(1, length + 1))

    @pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
    @pytest.mark.parametrize("share", [0.6, 1.0])
    def test_a_rate_becomes_what_is_measured(self, chance: float, share: float) -> None:
        rng, accuracy = random.Random(0), MatchAccuracy()
        guess, other = Guess(1, 2, 3, share), Guess(1, 3, 3)
        before, seen = accuracy.of(other), []
        for _ in range(3000):
            accuracy.learn([guess], [int(rng.random() < chance)])
            seen.append(accuracy.of(guess))
        assert sum(seen[-1000:]) / 1000 == pytest.approx(chance, abs=0.05)
        assert accuracy.of(other) == before

    def test_a_probability_is_one_at_most(self) -> None:
        """Where the share has been too low, the rate makes up for it."""
        accuracy = MatchAccuracy()
        for _ in range(1000):
            accuracy.learn([Guess(1, 2, 2, 0.5)], [1])
        assert accuracy.of(Guess(1, 2, 2, 0.5)) > 0.9
        assert accuracy.of(Guess(1, 2, 2, 1.0)) == 1.0

    def test_behind_a_wrong_guess_nothing_is_learnt(self) -> None:
        accuracy = MatchAccuracy()
        guesses = [Guess(1, 1), Guess(2, 2), Guess(3, 3)]
        before = [accuracy.of(guess) for guess in guesses]
        accuracy.learn(guesses, [1, 9, 3])
        after = [accuracy.of(guess) for guess in guesses]
        assert after[0] > before[0]
        assert after[1] < before[1]
        assert after[2] == before[2]


def test_expected_drafts_are_the_sum_of_their_survival() -> None:
    assert expected_len(NO_DRAFTS) == 0.0
    assert expected_len(drafts_of(0.5, 0.5, 1.0)) == 0.5 + 0.25 + 0.25


@pytest.mark.parametrize("max_tokens", [1, 2, 8, 64])
def test_few_sure_drafts_are_as_good_as_many_that_are_less(max_tokens: int) -> None:
    assert is_sure(drafts_of(*[SURE + 1e-9] * max_tokens), max_tokens)
    assert not is_sure(drafts_of(*[SURE - 1e-9] * max_tokens), max_tokens)
    assert is_sure(drafts_of(*[1.0] * 4), max_tokens)
    assert not is_sure(NO_DRAFTS, max_tokens)
    assert not is_sure(drafts_of(1.0), 2)
