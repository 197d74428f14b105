"""Suffix drafting: what it drafts, of whose texts, and what it keeps."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from deployments.router.drafting import suffix
from deployments.router.drafting.accuracy import expected_len
from deployments.router.drafting.chain import DrafterChain
from deployments.router.drafting.finished_texts import (
    KNOWN_LEN,
    READ_AT_ONCE,
    SHELF_TOKENS,
    FinishedTexts,
)
from deployments.router.drafting.suffix import SuffixDrafter
from deployments.router.sequence import FinishReason
from deployments.router.sequence import Sequence as LiveSequence
from deployments.router.tenants.keys import Tenant
from tests.deployments.loops import Stream, make_params
from workers.types import NO_DRAFTS

WORDS = tuple(range(100, 140))
NOBODY = ("", "")


def sequence_of(
    tokens: Sequence[int], *, seed: int = 1, salt: str = "", tenant: str = ""
) -> LiveSequence:
    """Sequences of one seed have one id."""
    params = make_params(seed, max_tokens=1000)
    params = replace(params, cache_salt=salt, tenant=Tenant(name=tenant))
    sequence = Stream(params).sequence
    sequence.tokens = list(tokens)
    return sequence


def finish(drafter: SuffixDrafter, tokens: Sequence[int], **of: str) -> None:
    """A text has ended, and is read."""
    sequence = sequence_of(tokens, **of)  # type: ignore[arg-type]
    sequence.finish_reason = FinishReason.STOP
    drafter.forget(sequence)
    while drafter._finished._num_waiting or drafter._finished._reading:
        drafter._finished.read()


class TestDrafts:
    def test_what_followed_in_a_finished_text_is_drafted(self) -> None:
        drafter = SuffixDrafter()
        finish(drafter, WORDS)
        drafts = drafter.draft(sequence_of([7, *WORDS[4:9]], seed=2), 6)
        assert (drafts.tokens, drafts.source) == (WORDS[9:15], "suffix")
        assert len(drafts.confidences) == 6
        assert drafter.draft(sequence_of([7, 8], seed=3), 6) == NO_DRAFTS

    def test_the_text_itself_is_drafted_from_too(self) -> None:
        drafter = SuffixDrafter()
        assert drafter.draft(sequence_of([5, 6, 7, 8, 9, 5, 6]), 3).tokens == (7, 8, 9)

    def test_of_both_the_one_is_taken_of_which_more_is_expected(self) -> None:
        drafter = SuffixDrafter()
        for follower in (20, 21):
            finish(drafter, [1, 2, 3, 4, follower, 5])
        once_here = [1, 2, 3, 4, 30, 31, 32, 9, 1, 2, 3, 4]
        assert drafter.draft(sequence_of(once_here, seed=2), 3).tokens == (30, 31, 32)
        for _ in range(8):
            finish(drafter, [1, 2, 3, 4, 40, 41, 42, 43])
        assert drafter.draft(sequence_of(once_here, seed=3), 3).tokens == (40, 41, 42)

    def test_counts_are_its_confidences(self) -> None:
        drafter = SuffixDrafter()
        for follower in (20, 20, 20, 21):
            finish(drafter, [1, 2, 3, follower, 5])
        sure = drafter.draft(sequence_of([1, 2], seed=2), 1)
        unsure = drafter.draft(sequence_of([1, 2, 3], seed=2), 1)
        assert (sure.tokens, unsure.tokens) == ((3,), (20,))
        assert unsure.confidences[0] < 0.8 * sure.confidences[0]

    def test_a_draft_ends_where_it_is_hardly_ever_right_as_far_as_that(self) -> None:
        drafter = SuffixDrafter()
        rng = random.Random(0)
        for _ in range(40):
            finish(drafter, [1, 2, 3, 4, rng.randrange(10, 30), rng.randrange(30, 60)])
        assert drafter.draft(sequence_of([1, 2], seed=2), 16).tokens == (3, 4)

    def test_it_learns_how_often_it_is_right(self) -> None:
        """Followers are drawn anew each time, so that one place tells nothing."""
        drafter, rng = SuffixDrafter(), random.Random(0)
        first = []
        for _ in range(150):
            finish(drafter, text := [*rng.choices(range(12), k=40)])
            sequence = sequence_of(text[:1], seed=2)
            for token in rng.choices(range(12), k=40):
                drafts = drafter.draft(sequence, 1)
                first.append(drafts.confidences[0] if drafts.tokens else 0.0)
                sequence.tokens.append(token)
            drafter.forget(sequence)
        assert sum(first[-200:]) / 200 < 0.25

    @pytest.mark.parametrize(("num_known", "is_heard"), [(4, True), (1, False)])
    def test_before_others_it_speaks_where_enough_is_expected(
        self, num_known: int, is_heard: bool
    ) -> None:
        first, last = SuffixDrafter(is_last=False), SuffixDrafter()
        for drafter in (first, last):
            for index in range(8):
                finish(drafter, [*WORDS[:8], *WORDS[8 : 8 + num_known], 200 + index, 300 + index])
        text = WORDS[:8]
        drafts = last.draft(sequence_of(text, seed=2), 8)
        assert drafts.tokens[:num_known] == WORDS[8 : 8 + num_known]
        assert (expected_len(drafts) > 3.0) is is_heard
        assert bool(first.draft(sequence_of(text, seed=2), 8).tokens) is is_heard
        assert first.draft(sequence_of(text, seed=3), 1).tokens == WORDS[8:9]


class TestSharing:
    def test_texts_are_shared_by_one_tenant_and_salt_only(self) -> None:
        drafter = SuffixDrafter()
        finish(drafter, WORDS, salt="s", tenant="t")
        for seed, (salt, tenant) in enumerate((("s", "u"), ("r", "t"), ("", ""), ("t", "s"))):
            asking = sequence_of(WORDS[:9], seed=seed, salt=salt, tenant=tenant)
            assert drafter.draft(asking, 4) == NO_DRAFTS
        asking = sequence_of(WORDS[:9], seed=9, salt="s", tenant="t")
        assert drafter.draft(asking, 4).tokens == WORDS[9:13]

    def test_a_text_is_shared_once_it_has_ended(self) -> None:
        drafter, sequence = SuffixDrafter(), sequence_of(WORDS)
        drafter.draft(sequence, 4)
        drafter.forget(sequence)  # it is suspended, and goes on later
        assert drafter._finished.num_tokens == 0
        sequence.is_cancelled = True
        drafter.forget(sequence)
        assert drafter._finished.num_tokens == len(WORDS)

    def test_nothing_is_kept_by_sequence_once_it_has_ended(self) -> None:
        drafter = SuffixDrafter()
        finish(drafter, WORDS)
        sequence = sequence_of(WORDS[:9], seed=2)
        drafter.draft(sequence, 4)
        assert len(drafter) == 2
        drafter.forget(sequence)
        drafter.forget(sequence)
        assert len(drafter) == 0


class TestBounds:
    def test_the_texts_kept_are_bounded_and_the_oldest_are_dropped(self) -> None:
        texts, rng = FinishedTexts(max_tokens=4096), random.Random(0)
        shares = [("", str(index)) for index in range(60)]
        most = 0
        for share in shares:
            texts.add(share, rng.choices(range(1000), k=150))
            texts.read(10_000)
            most = max(most, texts.num_tokens)
        assert 2048 < most <= 4096
        is_kept = [bool(texts.trees(share)) for share in shares]
        assert sorted(is_kept) == is_kept  # the last ones
        assert sum(is_kept) > 12

    def test_a_share_that_is_added_to_stays(self) -> None:
        texts, rng = FinishedTexts(max_tokens=4096), random.Random(0)
        for index in range(60):
            for share in (("", "stays"), ("", str(index))):
                texts.add(share, rng.choices(range(1000), k=50))
                texts.read(10_000)
        assert texts.trees(("", "stays"))
        assert not texts.trees(("", "0"))

    def test_one_share_has_three_trees_at_most_and_its_oldest_goes(self) -> None:
        texts, rng = FinishedTexts(max_tokens=4096), random.Random(0)
        for _ in range(100):
            texts.add(NOBODY, rng.choices(range(1000), k=150))
            texts.read(10_000)
            assert len(texts.trees(NOBODY)) <= 3
            assert texts.num_tokens <= 4096
        assert len(texts.trees(NOBODY)) > 1

    def test_many_salts_with_little_text_are_bounded_too(self) -> None:
        texts = FinishedTexts(max_tokens=4096)
        for index in range(2000):
            texts.add(("", str(index)), [1, 2])
            texts.read(10)
        assert len(texts._shelves) <= 4096 / SHELF_TOKENS

    def test_texts_that_wait_are_bounded_too(self) -> None:
        texts = FinishedTexts(max_tokens=4096)
        for index in range(50):
            texts.add(NOBODY, range(index, index + 100))
        assert 900 < texts.num_tokens <= 1024
        texts.add(NOBODY, range(5000))
        assert texts.num_tokens == 1024
        texts.read(10_000)
        (tree,) = texts.trees(NOBODY)
        assert len(tree._text) == 1024

    def test_a_round_reads_a_bounded_part_of_what_waits_however_many_drafts_it_has(self) -> None:
        drafter = SuffixDrafter()
        finished = sequence_of(range(10_000))
        finished.is_cancelled = True
        drafter.forget(finished)
        chain = DrafterChain([drafter])
        for _ in range(64):
            chain.turn_of(sequence_of([1], seed=2), 4)
        assert not drafter._finished.trees(NOBODY)
        chain.learn()
        (tree,) = drafter._finished.trees(NOBODY)
        assert len(tree._text) == READ_AT_ONCE

    def test_what_begins_as_an_earlier_text_is_not_counted_again(self) -> None:
        """As each turn of a chat, which has the turns before it in its prompt."""
        texts, rng = FinishedTexts(), random.Random(0)
        chat = rng.choices(range(1000), k=10 * KNOWN_LEN)
        for num_turns in range(1, 11):
            texts.add(NOBODY, chat[: num_turns * KNOWN_LEN])
            texts.read(10_000)
        texts.add(NOBODY, [0, *chat])  # nothing of this is a known beginning
        texts.read(10_000)
        (tree,) = texts.trees(NOBODY)
        assert len(chat) * 2 < len(tree._text) < len(chat) * 2 + 11 * suffix.MAX_MATCH_LEN
        assert texts.num_tokens < len(tree._text) + 2 * SHELF_TOKENS


def test_the_work_of_a_draft_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the texts are: a walk of MAX_MATCH_LEN nodes in each tree, for each token."""
    num_found = 0
    original = suffix.Guess

    def counted(*arguments: object) -> object:
        nonlocal num_found
        num_found += 1
        return original(*arguments)  # type: ignore[arg-type]

    drafter = SuffixDrafter()
    finish(drafter, [3] * 5000)
    monkeypatch.setattr(suffix, "Guess", counted)
    drafter.draft(sequence_of([3] * 100, seed=2), 8)
    assert 0 < num_found <= 8 * suffix.MAX_MATCH_LEN
