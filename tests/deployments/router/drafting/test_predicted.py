"""Predicted outputs: where a text goes on in what was predicted of it."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from deployments.router.drafting import lookup
from deployments.router.drafting.predicted import NEAR, WINDOW, PredictedOutput
from deployments.router.sequence import Sequence as LiveSequence
from tests.deployments.loops import Stream, make_params
from workers.types import NO_DRAFTS

FILE = tuple(range(100, 400))
"""A text in which no token stands twice."""


def sequence_of(prediction: Sequence[int], *, seed: int = 1) -> LiveSequence:
    """Its prompt is no part of its prediction."""
    params = replace(make_params(seed, max_tokens=5000), prediction=tuple(prediction))
    return Stream(replace(params, prompt=(1, 2, 3))).sequence


def drafts_behind(text: Sequence[int], prediction: Sequence[int] = FILE) -> tuple[int, ...]:
    """What is drafted after a text that came token by token."""
    drafter, sequence = PredictedOutput(), sequence_of(prediction)
    drafts = drafter.draft(sequence, 4)
    for token in text:
        sequence.tokens.append(token)
        drafts = drafter.draft(sequence, 4)
    return drafts.tokens


def tokens_per_round(prediction: Sequence[int], answer: Sequence[int], gamma: int = 16) -> float:
    """What a target that writes the answer makes of each verification."""
    drafter, sequence = PredictedOutput(), sequence_of(prediction)
    position = num_rounds = 0
    while position < len(answer):
        drafts = drafter.draft(sequence, gamma).tokens
        num_accepted = 0
        while num_accepted < min(len(drafts), len(answer) - position - 1) and (
            drafts[num_accepted] == answer[position + num_accepted]
        ):
            num_accepted += 1
        sequence.tokens += answer[position : position + num_accepted + 1]
        position += num_accepted + 1
        num_rounds += 1
    return len(answer) / num_rounds


class TestPlace:
    def test_the_prediction_is_drafted_from_its_beginning(self) -> None:
        assert drafts_behind([]) == FILE[:4]
        assert drafts_behind(FILE[:7]) == FILE[7:11]
        assert drafts_behind(FILE) == ()

    def test_a_token_in_place_of_another_is_passed_over(self) -> None:
        assert drafts_behind([*FILE[:9], 0]) == FILE[10:14]

    def test_several_tokens_in_place_of_one(self) -> None:
        assert drafts_behind([*FILE[:9], 0, 7, 8, FILE[10]]) == FILE[11:15]

    def test_an_insertion(self) -> None:
        assert drafts_behind([*FILE[:9], 0, 7, 8, 6, FILE[9]]) == FILE[10:14]

    def test_a_deletion(self) -> None:
        assert drafts_behind([*FILE[:9], FILE[12]]) == FILE[13:17]

    @pytest.mark.parametrize(("num_tokens", "is_found"), [(1, False), (2, True)])
    def test_far_behind_a_change_one_token_is_not_enough(
        self, num_tokens: int, is_found: bool
    ) -> None:
        first = 9 + NEAR + 20
        drafts = drafts_behind([*FILE[:9], *FILE[first : first + num_tokens]])
        end = first + num_tokens
        assert (drafts == FILE[end : end + 4]) is is_found

    @pytest.mark.parametrize(("num_tokens", "is_found"), [(3, False), (4, True)])
    @pytest.mark.parametrize("first", [0, 20 + WINDOW + 5])
    def test_before_it_and_beyond_the_window_it_takes_four(
        self, first: int, num_tokens: int, is_found: bool
    ) -> None:
        drafts = drafts_behind([*FILE[9:20], *FILE[first : first + num_tokens]], FILE)
        end = first + num_tokens
        assert (drafts == FILE[end : end + 4]) is is_found

    def test_of_equal_places_the_nearest_is_taken(self) -> None:
        lines = [number for line in range(10, 40) for number in (line, 1, 2, 3)]
        # the tokens of line 20 but its number were deleted; the line end stands everywhere
        assert drafts_behind([*lines[:41], 3], lines)[:1] == (21,)

    def test_nothing_is_drafted_while_the_text_has_left_it(self) -> None:
        away = range(1000, 1000 + NEAR + 1)
        assert drafts_behind([*FILE[:9], *away[:-1]]) != ()
        assert drafts_behind([*FILE[:9], *away]) == ()
        assert drafts_behind([*FILE[:9], *away, FILE[9]]) == FILE[10:14]

    def test_thoughts_may_come_before_it(self) -> None:
        assert drafts_behind([*range(1000, 1400), FILE[0]]) == FILE[1:5]


class TestDrafter:
    def test_a_file_with_small_edits_makes_five_tokens_a_round(self) -> None:
        """An edit in thirty tokens, of each kind in turn, in a file of few words."""
        rng = random.Random(0)
        file = [rng.choice(range(60)) for _ in range(1200)]
        answer = list(file)
        for index, place in enumerate(range(1170, 0, -30)):
            edit = [[60], [61, 62, 63], []][index % 3]
            answer[place : place + index % 4] = edit
        assert tokens_per_round(file, answer) > 5
        assert tokens_per_round(file, file) > 15

    def test_a_name_that_is_changed_everywhere(self) -> None:
        file = [token for line in range(100) for token in (50, 7, 51, 100 + line, 52, 53, 54, 55)]
        answer = [8 if token == 7 else token for token in file]
        assert tokens_per_round(file, answer) > 7

    def test_without_a_prediction_it_keeps_and_says_nothing(self) -> None:
        drafter = PredictedOutput()
        assert drafter.draft(sequence_of([]), 4) == NO_DRAFTS
        assert len(drafter) == 0

    def test_nothing_is_kept_of_a_sequence_that_has_ended(self) -> None:
        drafter, sequence = PredictedOutput(), sequence_of(FILE)
        drafter.draft(sequence, 4)
        assert len(drafter) == 1
        drafter.forget(sequence)
        drafter.forget(sequence)
        assert len(drafter) == 0

    def test_before_others_it_speaks_once_it_agrees_with_the_text(self) -> None:
        drafter, sequence = PredictedOutput(is_last=False), sequence_of(FILE)
        assert drafter.draft(sequence, 8) == NO_DRAFTS
        sequence.tokens += FILE[:4]
        assert drafter.draft(sequence, 8).tokens == FILE[4:12]
        sequence.tokens += [0]
        assert drafter.draft(sequence, 8) == NO_DRAFTS

    def test_a_wrong_prediction_is_known_to_be_wrong(self) -> None:
        drafter, rng = PredictedOutput(), random.Random(0)
        sequence = sequence_of(rng.choices(range(20), k=2000))
        for token in rng.choices(range(20), k=1500):
            sequence.tokens.append(token)
            drafter.draft(sequence, 4)
        drafts = drafter.draft(sequence, 4)
        assert drafts.confidences[0] < 0.2

    def test_the_work_of_a_round_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The text's last token stands everywhere."""
        num_compared = 0
        original = lookup.match_length

        def counted(*arguments: object, **more: object) -> int:
            nonlocal num_compared
            num_compared += 1
            return original(*arguments, **more)  # type: ignore[arg-type]

        drafter, sequence = PredictedOutput(), sequence_of([5, 6] * 5000)
        monkeypatch.setattr(lookup, "match_length", counted)
        monkeypatch.setattr("deployments.router.drafting.predicted.match_length", counted)
        sequence.tokens += [6, 5]
        drafter.draft(sequence, 4)
        assert 0 < num_compared <= 2 * lookup.MAX_PLACES
