"""Draft and target must speak the same tokens."""

from pathlib import Path

import pytest

from tests.tiny_models import save_model, save_tokenizer
from workers.errors import VocabularyMismatchError
from workers.vocabulary import check_same_vocabulary


def save_with_tokenizer(folder: Path, vocab_size: int, words: list[str]) -> str:
    save_model(folder, vocab_size=vocab_size)
    save_tokenizer(folder, words)
    return str(folder)


def test_equal_sizes_without_tokenizers_are_taken_as_equal(tmp_path: Path) -> None:
    check_same_vocabulary(save_model(tmp_path / "a"), save_model(tmp_path / "b"))


def test_different_sizes_are_named(tmp_path: Path) -> None:
    target, draft = save_model(tmp_path / "a"), save_model(tmp_path / "b", vocab_size=64)
    with pytest.raises(VocabularyMismatchError, match="97 and 64 tokens") as caught:
        check_same_vocabulary(target, draft)
    assert target in str(caught.value)
    assert "drafter=none" in str(caught.value)


def test_padded_embeddings_of_the_same_tokenizer_are_fine(tmp_path: Path) -> None:
    words = ["a", "b", "c"]
    check_same_vocabulary(
        save_with_tokenizer(tmp_path / "a", 97, words),
        save_with_tokenizer(tmp_path / "b", 128, words),
    )


def test_other_tokens_in_the_same_number_are_refused(tmp_path: Path) -> None:
    target = save_with_tokenizer(tmp_path / "a", 97, ["a", "b", "c"])
    draft = save_with_tokenizer(tmp_path / "b", 97, ["a", "b", "d"])
    with pytest.raises(VocabularyMismatchError, match="3 tokens each, but not the same ones"):
        check_same_vocabulary(target, draft)
