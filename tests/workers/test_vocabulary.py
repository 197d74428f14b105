"""What is done with a draft whose tokens are not the target's."""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, ByT5Tokenizer

from tests.tiny_models import save_model, save_tokenizer
from tests.tokenizers import save_speaking_model
from workers.errors import VocabularyMismatchError
from workers.vocabulary import ADVICE, compare_vocabularies


def save_with_tokenizer(folder: Path, vocab_size: int, words: list[str]) -> str:
    save_model(folder, vocab_size=vocab_size)
    save_tokenizer(folder, words)
    return str(folder)


def test_equal_sizes_without_tokenizers_are_taken_as_equal(tmp_path: Path) -> None:
    compare_vocabularies(save_model(tmp_path / "a"), save_model(tmp_path / "b"))


def test_different_sizes_are_named(tmp_path: Path) -> None:
    target, draft = save_model(tmp_path / "a"), save_model(tmp_path / "b", vocab_size=64)
    with pytest.raises(VocabularyMismatchError, match="embeddings of 97 and 64 tokens") as caught:
        compare_vocabularies(target, draft)
    assert target in str(caught.value)
    assert "drafter=none" in str(caught.value)


def test_padded_embeddings_of_the_same_tokenizer_are_fine(tmp_path: Path) -> None:
    words = ["a", "b", "c"]
    compare_vocabularies(
        save_with_tokenizer(tmp_path / "a", 97, words),
        save_with_tokenizer(tmp_path / "b", 128, words),
    )


def test_other_tokens_in_the_same_number_are_translated(tmp_path: Path) -> None:
    target = save_with_tokenizer(tmp_path / "a", 97, ["a", "b", "c"])
    draft = save_with_tokenizer(tmp_path / "b", 97, ["a", "b", "d"])
    found = compare_vocabularies(target, draft)
    assert found.token_map is not None
    assert found.token_map.draft_of == {0: 0, 1: 1}
    assert found.method == "intersection"
    assert "it has 67% of the target's, and the target 67% of its" in found.description


@pytest.mark.parametrize("more", ["target", "draft"])
def test_tokens_that_only_one_of_a_family_has_are_fine(more: str, tmp_path: Path) -> None:
    """Later models of a family add tokens at the end."""
    words = ["a", "b", "c"]
    longer = save_with_tokenizer(tmp_path / "longer", 97, [*words, "<added>", "<more>"])
    shorter = save_with_tokenizer(tmp_path / "shorter", 90, words)
    target, draft = (longer, shorter) if more == "target" else (shorter, longer)
    compare_vocabularies(target, draft)


def test_a_token_of_another_id_is_translated(tmp_path: Path) -> None:
    target = save_with_tokenizer(tmp_path / "a", 97, ["a", "b", "c", "d"])
    draft = save_with_tokenizer(tmp_path / "b", 97, ["a", "b", "d"])
    found = compare_vocabularies(target, draft)
    assert found.token_map is not None
    assert found.token_map.draft_of == {0: 0, 1: 1, 3: 2}


def test_tokens_that_were_added_may_differ(tmp_path: Path) -> None:
    """As those do that a family reserves: a few wrong drafts cost less than a translation."""
    words = ["a", "b"]
    names = []
    for added in ("<reserved>", "<call>"):
        names.append(save_with_tokenizer(tmp_path / added[1:3], 97, words))
        tokenizer = AutoTokenizer.from_pretrained(names[-1])
        tokenizer.add_tokens([added, "<both>"], special_tokens=True)
        tokenizer.save_pretrained(names[-1])
    assert compare_vocabularies(*names).method == "direct"
    assert compare_vocabularies(*names).description == ""
    other = save_with_tokenizer(tmp_path / "other", 97, ["a", "b", "c"])
    assert compare_vocabularies(names[0], other).method == "intersection"


@pytest.mark.parametrize(
    ("kinds", "method"),
    [
        (("byte level", "byte level"), "direct"),
        (("byte level", "other byte level"), "intersection"),
        (("sentence piece", "byte level"), "intersection"),
        (("byte level", "words"), "retokenize"),
    ],
)
def test_auto_takes_the_intersection_where_most_is_shared(
    kinds: tuple[str, str], method: str, tmp_path: Path
) -> None:
    target, draft = (
        save_speaking_model(tmp_path / role, kind)
        for role, kind in zip(("target", "draft"), kinds, strict=True)
    )
    assert compare_vocabularies(target, draft).method == method


def test_auto_looks_at_the_shares_of_both(tmp_path: Path) -> None:
    words = [*"abcdefghij"]
    few, many = words[:4], [*"ijhgfedcba"]
    names = {
        len(tokens): save_with_tokenizer(tmp_path / str(len(tokens)), 97, tokens)
        for tokens in (["d", *few[:3]], [*many, "k"])
    }
    assert compare_vocabularies(names[4], names[11]).method == "retokenize"
    assert compare_vocabularies(names[11], names[4]).method == "retokenize"


def test_the_same_ids_do_not_help_a_draft_that_lacks_most_tokens(tmp_path: Path) -> None:
    """It would see stand-ins in their place."""
    words = [*"abcdefg"]
    longer, half, shorter = (
        save_with_tokenizer(tmp_path / str(count), 97, words[:count]) for count in (6, 3, 2)
    )
    assert compare_vocabularies(longer, half).method == "direct"
    assert compare_vocabularies(longer, shorter).method == "retokenize"
    assert compare_vocabularies(shorter, longer).method == "retokenize"


def test_an_intersection_of_hardly_any_tokens_is_refused(tmp_path: Path) -> None:
    target = save_speaking_model(tmp_path / "target", "byte level")
    draft = save_speaking_model(tmp_path / "draft", "words")
    with pytest.raises(VocabularyMismatchError, match="use heterogeneous_vocab=retokenize") as e:
        compare_vocabularies(target, draft, "intersection")
    assert "only 1.8% of the tokens" in str(e.value)


@pytest.mark.parametrize("method", ["intersection", "retokenize"])
def test_a_method_is_used_where_it_is_asked_for(method: Any, tmp_path: Path) -> None:
    name = save_speaking_model(tmp_path / "target", "byte level")
    found = compare_vocabularies(name, name, method)
    assert found.method == method
    assert found.token_map is not None
    assert found.token_map.share_of_target == found.token_map.share_of_draft == 1.0


def test_a_method_needs_both_tokenizers(tmp_path: Path) -> None:
    target = save_speaking_model(tmp_path / "target", "byte level")
    draft = save_model(tmp_path / "draft")
    with pytest.raises(VocabularyMismatchError, match="but the draft has no tokenizer") as caught:
        compare_vocabularies(target, draft, "retokenize")
    assert ADVICE in str(caught.value)


def test_a_tokenizer_that_does_not_say_what_its_tokens_spell(tmp_path: Path) -> None:
    """As one in Python alone, which has no tokenizer.json."""
    target = save_speaking_model(tmp_path / "target", "byte level")
    draft = save_model(tmp_path / "draft")
    ByT5Tokenizer().save_pretrained(draft)
    sentence = (
        f"the tokenizer of '{draft}' does not say what its tokens spell; put its tokenizer.json "
        "beside its weights"
    )
    with pytest.raises(VocabularyMismatchError, match=re.escape(sentence)):
        compare_vocabularies(target, draft)
