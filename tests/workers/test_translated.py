"""Draft models with another tokenizer: what they draft, as if it were the target's."""

import dataclasses
import math
from itertools import product
from pathlib import Path

import pytest

from tests.tokenizers import TEXTS, save_speaking_model, wrapped
from tests.workers.decoding import CACHE, GREEDY, PENALISED, SAMPLED, generate
from tests.workers.translating import METHODS, PERMUTED, drafter_of, encode, load, propose, request
from workers.drafters.model import ModelDrafter
from workers.drafters.retokenized import LOOK_BEHIND
from workers.grammar import Grammar
from workers.paged_model import CacheOptions
from workers.sampling_params import SamplingParams
from workers.target import Target
from workers.types import HeterogeneousVocab, ProposeResult

IN_WORDS = SamplingParams(temperature=0.9, grammar=Grammar.regex("([a-z]{2,9} )+"))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED, IN_WORDS], ids=str)
def test_a_permuted_vocabulary_drafts_as_the_original(
    sampling: SamplingParams, model_names: dict[str, str]
) -> None:
    """The same tokens with the same confidences, as the noise goes by the target's ids."""
    original = ModelDrafter(load(model_names["byte level"]), CACHE)
    permuted = drafter_of(model_names, "byte level", "permuted byte level", "intersection")
    tokens = encode("byte level")
    for drafter in (original, permuted):  # so that no mask is lacking while the first one drafts
        if sampling.grammar is not None:
            drafter._grammars._compiler.compile(sampling.grammar).result()
    drafts = {
        len(tokens[:end]): [
            propose(drafter, request(tokens[:end], base_len=base, sampling=sampling))
            for drafter in (original, permuted)
        ]
        for base, end in ((0, 9), (9, 10), (10, 14))
    }
    for ours, theirs in drafts.values():
        assert len(ours.draft_tokens) == 6
        assert theirs.draft_tokens == ours.draft_tokens
        assert theirs.confidences == pytest.approx(ours.confidences, abs=2e-5)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "", "penalties"])
@pytest.mark.parametrize(
    ("kind", "method"),
    # of the bytes, a random model writes the letters of a token one by one: another cut
    [pair for pair in product(PERMUTED, METHODS) if pair != ("byte level", "retokenize")],
)
def test_the_target_itself_with_other_ids_is_always_right(
    kind: str, method: HeterogeneousVocab, sampling: SamplingParams, model_names: dict[str, str]
) -> None:
    """By way of the text too, where the text has one cut only."""
    others = (
        [(token, -100.0) for token in range(95, len(wrapped(kind)))] if kind == "letters" else []
    )
    sampling = dataclasses.replace(sampling, logit_bias=((0, -100.0), *others))
    target, prompt = Target(load(model_names[kind]), CACHE), encode(kind)
    truth = generate(target, prompt, 30, sampling=sampling, seed=1)
    drafter = drafter_of(model_names, kind, f"permuted {kind}", method)
    done, base_len = 0, 0
    for k in (4, 1, 8, 3, 4, 5):
        tokens = prompt + truth[:done]
        asked = request(tokens, base_len=base_len, k=k, sampling=sampling, prompt_len=len(prompt))
        assert list(propose(drafter, asked).draft_tokens) == truth[done : done + k]
        base_len = len(tokens)
        done += k + 1


@pytest.mark.parametrize(
    ("target", "draft", "method"),
    [
        (target, draft, method)
        for target in ("byte level", "sentence piece")
        for draft in ("other byte level", "sentence piece", "words")
        for method in METHODS
        # words are whole ones: hardly any is a token of the targets
        if draft != target and (draft, method) != ("words", "intersection")
    ],
)
def test_what_is_kept_changes_no_draft(
    target: str, draft: str, method: HeterogeneousVocab, model_names: dict[str, str]
) -> None:
    """After commits, wrong assumptions and rejections, drafts are those of a drafter that knows
    nothing of the sequence."""
    tokens = encode(target, "".join(TEXTS))
    model = load(model_names[draft])
    worker = drafter_of(model_names, target, draft, method, model=model)
    forgetful = dataclasses.replace(CACHE, prefix_caching=False)
    new = drafter_of(model_names, target, draft, method, forgetful, model=model)
    steps = [
        (0, 40, ()),
        (40, 41, tokens[41:44]),
        (41, 47, ()),
        (47, 48, tokens[3:9]),
        (48, 60, ()),
    ]
    for base, end, assumed in steps:
        asked = request(tokens[:end], base_len=base, assumed=assumed, sampling=SAMPLED)
        kept = propose(worker, asked)
        fresh = propose(new, request(tokens[:end], assumed=assumed, sampling=SAMPLED))
        new.release(["s"])
        assert kept.needs_tokens_from is None
        assert kept.draft_tokens == fresh.draft_tokens
        assert kept.confidences == pytest.approx(fresh.confidences, abs=2e-5)
        vocabulary = range(len(wrapped(target)))
        assert all(token in vocabulary for token in kept.draft_tokens)
        assert all(0.0 < confidence <= 1.0 for confidence in kept.confidences)
        assert len(kept.confidences) == len(kept.draft_tokens) <= 6
    worker.release(["s"])
    assert len(worker) == worker.num_used_blocks == 0


@pytest.mark.parametrize("method", METHODS)
def test_what_a_round_costs_does_not_grow_with_the_text(
    method: HeterogeneousVocab, model_names: dict[str, str]
) -> None:
    tokens = encode("byte level", TEXTS[1] * 2)
    drafter = drafter_of(model_names, "byte level", "sentence piece", method)
    propose(drafter, request(tokens[:-1], k=0))
    before = drafter.num_tokens_run
    propose(drafter, request(tokens, base_len=len(tokens) - 1, k=1))
    assert 1 <= drafter.num_tokens_run - before <= 12


def test_nor_does_that_of_a_draft_with_recurrent_layers(
    model_names: dict[str, str], tmp_path: Path
) -> None:
    """A state is that of a whole text, but one is kept before the tokens that are cut anew."""
    name = save_speaking_model(tmp_path, "sentence piece", family="qwen3_5")
    names = {**model_names, "recurrent": name}
    tokens = encode("byte level", TEXTS[1] * 2)
    model = load(name)
    drafter = drafter_of(names, "byte level", "recurrent", "retokenize", model=model)
    propose(drafter, request(tokens[:40], k=0))
    for end in range(41, 67):
        before = drafter.num_tokens_run
        kept = propose(drafter, request(tokens[:end], base_len=end - 1, k=3))
        assert drafter.num_tokens_run - before <= 2 * LOOK_BEHIND
        if end % 13 == 0:
            fresh = drafter_of(names, "byte level", "recurrent", "retokenize", model=model)
            assert kept.draft_tokens == propose(fresh, request(tokens[:end], k=3)).draft_tokens


@pytest.mark.parametrize("method", METHODS)
def test_missing_tokens_are_asked_for(
    method: HeterogeneousVocab, model_names: dict[str, str]
) -> None:
    tokens = encode("byte level")
    drafter = drafter_of(model_names, "byte level", "sentence piece", method)
    assert propose(drafter, request(tokens, base_len=7)).needs_tokens_from == 0
    assert len(drafter) == 0
    propose(drafter, request(tokens[:4]))
    assert propose(drafter, request(tokens, base_len=7)).needs_tokens_from == 4
    assert propose(drafter, request(tokens, base_len=3)).needs_tokens_from is None


@pytest.mark.parametrize("method", METHODS)
def test_progress_is_told_in_the_tokens_of_the_target(
    method: HeterogeneousVocab, model_names: dict[str, str]
) -> None:
    tokens = encode("byte level", "".join(TEXTS[1:]))
    cache = CacheOptions(block_size=4, prefix_caching=False)
    drafter = drafter_of(model_names, "byte level", "sentence piece", method, cache)
    whole = propose(drafter, request(tokens))
    drafter.release(["s"])
    drafter.submit(request(tokens))
    drafter.step()
    (progress,) = drafter.report_progress(["s"])
    assert progress.needs_tokens_from is not None
    assert 0 < progress.needs_tokens_from < len(tokens)
    assert propose(drafter, request(tokens, base_len=progress.needs_tokens_from)) == whole


def test_drafts_stop_where_the_context_of_the_draft_ends(model_names: dict[str, str]) -> None:
    """A sequence that is too long in the draft's tokens gets an error, which costs drafts only."""
    tokens = encode("sentence piece")
    short = CacheOptions(block_size=4, max_model_len=16)
    drafter = drafter_of(model_names, "sentence piece", "byte level", "intersection", short)
    assert len(propose(drafter, request(tokens[:6], k=32)).draft_tokens) <= 10
    error = propose(drafter, request(tokens, base_len=6)).error
    assert "at most 16 in all; these are the draft's tokens" in error
    assert len(drafter) == 0


def test_a_prompt_that_the_draft_cannot_say_gets_no_drafts(model_names: dict[str, str]) -> None:
    drafter = drafter_of(model_names, "sentence piece", "words", "retokenize")
    beginning = wrapped("sentence piece").bos_token_id
    assert propose(drafter, request([beginning])) == ProposeResult(seq_id="s")


@pytest.mark.parametrize("method", METHODS)
def test_what_fails_for_one_sequence_ends_that_one(
    method: HeterogeneousVocab, model_names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = drafter_of(model_names, "byte level", "sentence piece", method)
    tokens = encode("byte level")
    propose(drafter, request(tokens[:4]))
    monkeypatch.setattr(drafter._translation._map, "_pieces", None)
    monkeypatch.setattr(drafter._histories["s"], "_append", None)
    assert "internal error" in propose(drafter, request(tokens[:6], base_len=4)).error
    assert len(drafter) == drafter.num_sequences == 0


@pytest.mark.parametrize("method", METHODS)
def test_what_a_draft_raises_in_one_sequence_changes_no_other(
    method: HeterogeneousVocab, model_names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = drafter_of(model_names, "byte level", "sentence piece", method)
    good = request(encode("byte level"))
    alone = propose(drafter, good)
    drafter.release(["s"])
    note = drafter._translation.note

    def fail_for_the_bad(drafted: list[int], column: int) -> None:
        if (history := drafter._histories.get("bad")) and drafted is history.drafted:
            raise ArithmeticError("a defect")
        note(drafted, column)

    monkeypatch.setattr(drafter._translation, "note", fail_for_the_bad)
    results = drafter.propose([good, dataclasses.replace(good, seq_id="bad")])
    assert "internal error" in {result.seq_id: result for result in results}["bad"].error
    assert alone in results
    drafter.check_integrity()


def test_a_token_of_several_drafts_is_as_sure_as_they_are_together(
    model_names: dict[str, str],
) -> None:
    drafter = drafter_of(model_names, "byte level", "permuted byte level", "retokenize")
    history = drafter._translation.begin()
    history.update(0, encode("byte level", "the quick brown "))
    letters = [wrapped_id(model_names["permuted byte level"], letter) for letter in "fox!"]
    tokens, sure = drafter._translation.answer(history, letters, [0.9, 0.8, 0.5, 0.7])
    assert list(tokens) == encode("byte level", "fox!")
    assert math.prod(sure) == pytest.approx(0.9 * 0.8 * 0.5 * 0.7)
    assert sure[-1] == pytest.approx(0.7)


def wrapped_id(name: str, letter: str) -> int:
    from transformers import AutoTokenizer

    return int(AutoTokenizer.from_pretrained(name).get_vocab()[letter])
