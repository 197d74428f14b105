"""Values that cross processes: drafts as they are cut and joined."""

from workers.types import MAX_CATCH_UP, NO_DRAFTS, DraftTokens, ProposeRequest, is_prefill_len

DRAFTS = DraftTokens(tokens=(1, 2, 3), confidences=(0.9, 0.8, 0.7), source="model")


def test_drafts_are_cut_with_their_confidences() -> None:
    assert DRAFTS.first(1) == DraftTokens(tokens=(1,), confidences=(0.9,), source="model")
    assert DRAFTS.after(1) == DraftTokens(tokens=(2, 3), confidences=(0.8, 0.7), source="model")
    assert DRAFTS.first(0) + DRAFTS.after(0) == DRAFTS
    assert DRAFTS.first(9) == DRAFTS
    assert DRAFTS.after(9).tokens == ()


def test_drafts_are_cut_and_joined_with_their_laws() -> None:
    drawn = DraftTokens(tokens=(1, 2, 3), source="model", law=(b"a", b"b", b"c"))
    assert drawn.first(1).law == (b"a",)
    assert drawn.after(1).law == (b"b", b"c")
    assert drawn.first(2) + drawn.after(2) == drawn
    certain = DraftTokens(tokens=(4, 5), source="suffix")
    assert (certain + drawn).law == (b"", b"", b"a", b"b", b"c")
    assert (drawn + certain).law == (b"a", b"b", b"c", b"", b"")
    assert (certain + certain).law == ()


def test_joined_drafts_are_from_the_first_source_that_has_some() -> None:
    looked_up = DraftTokens(tokens=(4,), source="prompt_lookup")
    assert (NO_DRAFTS + looked_up) == looked_up
    assert (looked_up + DRAFTS).tokens == (4, 1, 2, 3)
    assert (looked_up + DRAFTS).source == "prompt_lookup"


def test_a_drafter_is_given_the_assumed_tokens_after_the_committed_ones() -> None:
    request = ProposeRequest(
        seq_id="s", base_len=3, new_tokens=(7,), assumed_tokens=(8, 9), k=2, prompt_len=2
    )
    assert request.given_tokens == (7, 8, 9)


def test_what_fits_a_round_is_no_prefill() -> None:
    assert not is_prefill_len(MAX_CATCH_UP)
    assert is_prefill_len(MAX_CATCH_UP + 1)
