"""Prompt lookup against a plain search, and what it keeps."""

import random
from collections.abc import Sequence

import pytest

from deployments.router.drafting import lookup
from deployments.router.drafting.accuracy import MAX_MATCH_LEN, SURE
from deployments.router.drafting.lookup import (
    MAX_INDEXED_AT_ONCE,
    MAX_PLACES,
    Match,
    PlaceIndex,
    PromptLookup,
    continuation,
)
from deployments.router.sequence import Sequence as LiveSequence
from tests.deployments.loops import Stream, make_params
from workers.types import NO_DRAFTS


def search(tokens: Sequence[int]) -> Match | None:
    """Every earlier place that ends as the text does, compared in full."""
    end = len(tokens) - 1
    places = [p for p in range(1, end) if list(tokens[p - 1 : p + 1]) == list(tokens[end - 1 :])]
    best = None
    for place in reversed(places[-MAX_PLACES:]):
        length = 2
        while (
            length < MAX_MATCH_LEN
            and place >= length
            and tokens[place - length] == tokens[end - length]
        ):
            length += 1
        if best is None or length > best.length:
            best = Match(position=place, length=length)
    if best is None:
        singles = [p for p in range(end) if tokens[p] == tokens[end]]
        best = Match(position=singles[-1], length=1) if singles else None
    return best


def make_text(rng: random.Random) -> list[int]:
    """Random tokens of a small alphabet, with passages that are copied."""
    alphabet = rng.choice([1, 2, 3, 10, 1000, 2**31 - 1])
    length = rng.choice([1, 2, 5, 40, 300])
    text: list[int] = []
    while len(text) < length:
        if text and rng.random() < 0.3:
            start = rng.randrange(len(text))
            text += text[start : start + rng.randrange(40)]
        else:
            text.append(rng.randrange(alphabet))
    return text


def sequence_of(tokens: Sequence[int], *, seed: int = 1) -> LiveSequence:
    """Sequences of one seed have one id."""
    sequence = Stream(make_params(seed, max_tokens=1000)).sequence
    sequence.tokens = list(tokens)
    return sequence


class TestIndex:
    def test_it_finds_what_a_plain_search_finds_however_the_text_grew(
        self, pytestconfig: pytest.Config
    ) -> None:
        num_cases, found = pytestconfig.getoption("--cases"), 0
        for seed in range(num_cases):
            rng = random.Random(seed)
            text = make_text(rng)
            index, length = PlaceIndex(), 0
            while length < len(text):
                length = min(len(text), length + rng.choice([1, 2, 17, 200]))
                assert index.extend(text[:length])
                match = index.find(text[:length])
                assert match == search(text[:length]), (seed, length)
                found += match is not None
        assert found > num_cases

    def test_the_longest_match_wins_and_of_equals_the_latest(self) -> None:
        text = [1, 2, 3, 4, 9, 8, 3, 4, 7, 2, 3, 4, 5, 1, 2, 3, 4]
        index = PlaceIndex()
        index.extend(text)
        # [1, 2, 3, 4] at the beginning; [2, 3, 4] and [3, 4] stand later
        assert index.find(text) == Match(position=3, length=4)
        index, text = PlaceIndex(), [5, 6, 1, 5, 6, 2, 5, 6]
        index.extend(text)
        assert index.find(text) == Match(position=4, length=2)

    def test_places_too_far_back_are_not_compared(self) -> None:
        for num_between, length in ((MAX_PLACES - 1, 4), (MAX_PLACES, 2)):
            text = [7, 8, 1, 2, 5] + [0, 1, 2] * num_between + [7, 8, 1, 2]
            index = PlaceIndex()
            index.extend(text)
            match = index.find(text)
            assert match is not None
            assert match.length == length

    def test_one_token_is_a_match_and_none_is_none(self) -> None:
        for text, match in (
            ([4], None),
            ([4, 5, 6], None),
            ([4, 4], Match(position=0, length=1)),
            ([4, 5, 4, 6, 4], Match(position=2, length=1)),
        ):
            index = PlaceIndex()
            assert index.extend(text)
            assert index.find(text) == match

    def test_what_follows_goes_round_at_the_end_of_the_text(self) -> None:
        assert continuation([1, 2, 3, 1, 2], 1, 5, 7) == (3, 1, 2, 3, 1, 2, 3)
        assert continuation([4, 4, 4], 1, 3, 2) == (4, 4)
        # the text of a moment ago, of which more is known by now
        assert continuation([1, 2, 3, 1, 2, 9, 9], 1, 5, 4) == (3, 1, 2, 3)


class TestDrafter:
    def test_it_drafts_what_followed(self) -> None:
        lookup, sequence = PromptLookup(), sequence_of([5, 6, 7, 8, 9, 5, 6])
        drafts = lookup.draft(sequence, 3)
        assert (drafts.tokens, drafts.source) == ((7, 8, 9), "prompt_lookup")
        assert len(drafts.confidences) == 3
        assert lookup.draft(sequence, 8).tokens == (7, 8, 9, 5, 6, 7, 8, 9)
        sequence.tokens += [1]
        assert lookup.draft(sequence, 3) == NO_DRAFTS
        sequence.tokens += [6]
        assert lookup.draft(sequence, 3).tokens == (1, 6, 1)

    def test_its_drafts_are_those_of_a_new_one(self) -> None:
        for seed in range(50):
            rng = random.Random(seed)
            text = make_text(rng)
            grown, sequence = PromptLookup(), sequence_of(text[:1])
            for token in text[1:]:
                sequence.tokens.append(token)
                if rng.random() < 0.5:
                    drafts = grown.draft(sequence, 8)
                    assert drafts.tokens == PromptLookup().draft(sequence, 8).tokens

    def test_nothing_is_kept_of_a_sequence_that_has_ended(self) -> None:
        lookup, sequence = PromptLookup(), sequence_of([1, 2, 1, 2])
        lookup.draft(sequence, 1)
        assert len(lookup) == 1
        lookup.forget(sequence)
        lookup.forget(sequence)
        assert len(lookup) == 0

    def test_a_long_prompt_is_taken_in_over_several_rounds(self) -> None:
        rng = random.Random(0)
        tokens = rng.choices(range(1000), k=2 * MAX_INDEXED_AT_ONCE + 100)
        lookup, sequence = PromptLookup(), sequence_of([*tokens, *tokens[:20]])
        assert lookup.draft(sequence, 4) == NO_DRAFTS
        assert lookup.draft(sequence, 4) == NO_DRAFTS
        assert lookup.draft(sequence, 4).tokens == tuple(tokens[20:24])

    def test_it_is_as_sure_as_it_was_right_of_late(self) -> None:
        """A text that repeats itself but for every fourth token, drawn anew each time."""
        rng = random.Random(0)
        drafter, sequence = PromptLookup(), sequence_of([])
        for index in range(1, 6000):
            sequence.tokens.append(index % 8 if index % 4 else rng.randrange(100, 200))
            drafter.draft(sequence, 1)
        # after 1 2 comes 3, always; after 1 2 3 what was drawn
        drafts = drafter.draft(sequence_of([9, 1, 2, 3, 8, 1, 2], seed=2), 2)
        assert drafts.tokens == (3, 8)
        assert drafts.confidences[0] > 0.9
        assert drafts.confidences[1] < 0.1

    def test_before_others_it_speaks_only_where_it_is_sure(self) -> None:
        last, first = PromptLookup(), PromptLookup(is_last=False)
        weak = sequence_of([5, 6, 7, 8, 9, 5, 6])
        strong = sequence_of([1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3, 4, 5, 6, 7], seed=2)
        assert last.draft(weak, 1).confidences[0] < SURE
        assert first.draft(weak, 1) == NO_DRAFTS
        assert first.draft(strong, 1).confidences[0] > SURE
        assert first.draft(strong, 1).tokens == (8,)

    def test_it_learns_of_drafts_that_nobody_verified(self) -> None:
        """So that it is heard again where its matches have become good."""
        drafter, sequence = PromptLookup(is_last=False), sequence_of([])
        drafter._accuracy._rates[1] = [0.1] * (MAX_MATCH_LEN + 1)
        heard = []
        for index in range(600):
            sequence.tokens.append(index % 5)
            heard.append(bool(drafter.draft(sequence, 4).tokens))
        assert not any(heard[:50])
        assert all(heard[-50:])


def test_the_work_of_a_round_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token over and over is the worst text: every place matches in full."""
    compared = 0
    original = lookup.match_length

    def count(*arguments: object, **more: object) -> int:
        nonlocal compared
        compared += 1
        return original(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(lookup, "match_length", count)
    index, text = PlaceIndex(), [3] * 2000
    index.extend(text)
    index.find(text)
    assert compared == 1  # the first agrees as far as is compared
    index, text = PlaceIndex(), [*([1, 2, 9, 0] * 500), 1, 2]
    index.extend(text)
    index.find(text)
    assert compared <= 1 + MAX_PLACES
