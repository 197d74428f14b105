"""Draft and target must speak the same tokens."""

from pathlib import Path

import pytest

from tests.tiny_models import save_model, save_tokenizer
from workers.errors import VocabularyMismatchError
from workers.vocabulary import check_shared_vocabulary


def save_with_tokenizer(folder: Path, vocab_size: int, words: list[str]) -> str:
    save_model(folder, vocab_size=vocab_size)
    save_tokenizer(folder, words)
    return str(folder)


def test_equal_sizes_without_tokenizers_are_taken_as_equal(tmp_path: Path) -> None:
    check_shared_vocabulary(save_model(tmp_path / "a"), save_model(tmp_path / "b"))


def test_different_sizes_are_named(tmp_path: Path) -> None:
    target, draft = save_model(tmp_path / "a"), save_model(tmp_path / "b", vocab_size=64)
    with pytest.raises(VocabularyMismatchError, match="embeddings of 97 and 64 tokens") as caught:
        check_shared_vocabulary(target, draft)
    assert target in str(caught.value)
    assert "drafter=none" in str(caught.value)


def test_padded_embeddings_of_the_same_tokenizer_are_fine(tmp_path: Path) -> None:
    words = ["a", "b", "c"]
    check_shared_vocabulary(
        save_with_tokenizer(tmp_path / "a", 97, words),
        save_with_tokenizer(tmp_path / "b", 128, words),
    )


def test_other_tokens_in_the_same_number_are_refused(tmp_path: Path) -> None:
    target = save_with_tokenizer(tmp_path / "a", 97, ["a", "b", "c"])
    draft = save_with_tokenizer(tmp_path / "b", 97, ["a", "b", "d"])
    with pytest.raises(VocabularyMismatchError, match="id 2 is 'c' to the target and 'd' to the"):
        check_shared_vocabulary(target, draft)


@pytest.mark.parametrize("more", ["target", "draft"])
def test_tokens_that_only_one_of_a_family_has_are_fine(more: str, tmp_path: Path) -> None:
    """Later models of a family add tokens at the end."""
    words = ["a", "b", "c"]
    longer = save_with_tokenizer(tmp_path / "longer", 97, [*words, "<added>", "<more>"])
    shorter = save_with_tokenizer(tmp_path / "shorter", 90, words)
    target, draft = (longer, shorter) if more == "target" else (shorter, longer)
    check_shared_vocabulary(target, draft)


def test_a_token_of_another_id_is_refused(tmp_path: Path) -> None:
    target = save_with_tokenizer(tmp_path / "a", 97, ["a", "b", "c", "d"])
    draft = save_with_tokenizer(tmp_path / "b", 97, ["a", "b", "d"])
    with pytest.raises(VocabularyMismatchError, match="is 'c' to the target and 'd' to the draft"):
        check_shared_vocabulary(target, draft)
