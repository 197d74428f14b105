"""What tokens spell, and how texts are cut that a tokenizer has in other characters."""

import random
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tokenizers import TEXTS, byte_level, sentence_piece
from workers import spelling
from workers.spelling import Encoder, Spelling

ACCENTS = "Tiếng Việt, naïve cafés, Größe und Ärger, the quick brown fox, ガラス\n"


def composing(make: Callable[..., Tokenizer]) -> Spelling:
    """A tokenizer that puts letters and their accents together, as Qwen's does."""
    tokenizer = make([*TEXTS, ACCENTS])
    parts = [normalizers.NFC(), *([tokenizer.normalizer] if tokenizer.normalizer else [])]
    tokenizer.normalizer = normalizers.Sequence(parts)
    return Spelling("composing", PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def apart(text: str) -> str:
    """The text with letters and accents apart."""
    return unicodedata.normalize("NFD", text)


class CountingTokenizer:
    """A tokenizer that counts the characters it is given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_characters = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **options: Any) -> Any:
        self.num_characters += len(text)
        return self._tokenizer.encode(text, **options)


def test_a_text_in_other_characters_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[CountingTokenizer] = []

    class Counted:
        @staticmethod
        def from_str(content: str) -> CountingTokenizer:
            made.append(CountingTokenizer(Tokenizer.from_str(content)))
            return made[-1]

    spelt = composing(byte_level)
    monkeypatch.setattr(spelling, "Tokenizer", Counted)
    encoder = Encoder(spelt)
    text = apart(ACCENTS) * 40
    encoder.encode(text.encode())
    assert sum(tokenizer.num_characters for tokenizer in made) == len(text)


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_only_words_in_other_characters_are_cut_otherwise(make: Callable[..., Tokenizer]) -> None:
    spelt = composing(make)
    encoder = Encoder(spelt)
    for text in (ACCENTS, "é", "éa", " é", "aé b", "the é", "ガ fox"):
        raw = apart(text).encode()
        cut = encoder.encode(raw, 5)
        said = b"".join(spelt.bytes_of[token] for token, _ in cut)
        assert said in (raw, b" " + raw)
        assert cut[-1][1] == 5 + len(raw)
    cut = encoder.encode(b"the quick brown fox " + raw)
    plain = encoder.encode(b"the quick brown fox")
    assert cut[: len(plain)] == plain


def test_a_token_of_many_spaces_is_looked_for_at_spaces_only() -> None:
    """Elsewhere each place would cost 128 look-ups."""

    class Counting(dict[bytes, list[int]]):
        num_looked_up = 0

        def get(self, key: bytes, default: Any = None) -> Any:
            self.num_looked_up += 1
            return super().get(key, default)

    tokenizer = byte_level()
    tokenizer.add_tokens([" " * 128])
    spelt = Spelling("spaces", PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    spelt.ids_of = looked_up = Counting(spelt.ids_of)
    text = "東京と".encode() * 20
    assert spelt.cut(text)[-1][1] == len(text)
    assert looked_up.num_looked_up < 10 * len(text)


def added_spaces() -> dict[str, Tokenizer]:
    """Tokenizers that put a space before a text, by the way they do."""
    prepending = sentence_piece()
    marking = sentence_piece()
    marking.normalizer = normalizers.NFC()
    marking.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    lettering = byte_level()
    lettering.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()])
    return {"prepend": prepending, "metaspace": marking, "byte level": lettering}


@pytest.mark.parametrize("way", added_spaces())
def test_a_space_is_added_at_a_beginning_without_one_and_nowhere_else(way: str) -> None:
    spelt = Spelling(way, PreTrainedTokenizerFast(tokenizer_object=added_spaces()[way]))
    encoder, rng = Encoder(spelt), random.Random(0)

    def said(text: bytes, *, is_beginning: bool) -> bytes:
        cut = encoder.encode(text, is_beginning=is_beginning)
        return b"".join(spelt.bytes_of[token] for token, _ in cut)

    words = [*" ".join(TEXTS).encode().split(b" "), b"", b"\xe4", b"\n", "京".encode()]
    for _ in range(100):
        text = rng.choice([b"", b" "]).join(rng.choices(words, k=4))
        assert said(text, is_beginning=False) == text
        assert said(text, is_beginning=True) in (text, b" " + text)
    assert said(b"the fox", is_beginning=True) == b" the fox"
    assert said(b" the fox", is_beginning=True) == b" the fox"
