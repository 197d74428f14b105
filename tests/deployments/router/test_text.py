"""Text as it is streamed: whole characters, and nothing of a stop string."""

import random

import pytest
from tokenizers import Tokenizer

from deployments.router.text import CompletionText, IncrementalDecoder, StopStrings, split_text
from tests.fakes import byte_tokenizer

TEXTS = [
    "def f(x):\n    return x + 1\n",
    "naïve café — “quotes” … ¿qué?",
    "日本語のテキスト、漢字かな交じり文。",
    "emoji: 👩‍👩‍👧‍👦 🇩🇪 👍🏽 🧑🏻‍🚀",
    "مرحبا بالعالم שלום עולם",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer(TEXTS)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prompt", ["", "some prompt ", "日本"])
def test_pieces_are_whole_characters_and_make_the_text(
    text: str, prompt: str, tokenizer: Tokenizer
) -> None:
    decoder = IncrementalDecoder(tokenizer, tokenizer.encode(prompt).ids)
    tokens = tokenizer.encode(text).ids
    assert len(tokens) > len(text) // 2
    pieces = [decoder.push(token) for token in tokens]
    assert "".join(pieces) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    assert decoder.finish() == ""


@pytest.mark.parametrize("seed", range(200))
def test_any_tokens_stream_to_what_they_decode_to_at_once(seed: int, tokenizer: Tokenizer) -> None:
    """Random bytes are mostly no text: broken characters must neither be lost nor doubled."""
    rng = random.Random(seed)
    size = tokenizer.get_vocab_size()
    prompt = rng.choices(range(size), k=rng.randrange(4))
    tokens = rng.choices(range(size), k=rng.randrange(1, 40))
    decoder = IncrementalDecoder(tokenizer, prompt)
    streamed = "".join(decoder.push(token) for token in tokens) + decoder.finish()
    whole, start = tokenizer.decode(prompt + tokens), tokenizer.decode(prompt)
    num_known = next((i for i in range(len(start)) if not whole.startswith(start[: i + 1])), None)
    assert streamed == whole[len(start) if num_known is None else num_known :]


@pytest.mark.parametrize("character", ["世", "é", "👍"])
@pytest.mark.parametrize("first", ["", "A ", "日"])
def test_a_character_that_the_prompt_began_is_emitted_whole(
    character: str, first: str, tokenizer: Tokenizer
) -> None:
    """A prompt of token ids may end inside a character, which the first tokens complete."""
    tokens = tokenizer.encode(character).ids
    for cut in range(1, len(tokens)):
        decoder = IncrementalDecoder(tokenizer, tokenizer.encode(first).ids + tokens[:cut])
        rest = tokens[cut:] + tokenizer.encode("ab").ids
        assert "".join(decoder.push(token) for token in rest) == f"{character}ab"


def test_an_unfinished_character_shows_at_the_end_only(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("👍").ids
    decoder = IncrementalDecoder(tokenizer, [])
    assert [decoder.push(token) for token in tokens[:-1]] == [""] * (len(tokens) - 1)
    assert set(decoder.finish()) == {"\N{REPLACEMENT CHARACTER}"}


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    decoder = IncrementalDecoder(tokenizer, tokenizer.encode("a").ids)
    assert decoder.push(tokenizer.token_to_id("<|end|>")) == ""


class TestStopStrings:
    def run(self, stop: list[str], pieces: list[str]) -> tuple[list[str], bool]:
        cutter = StopStrings(stop)
        emitted = []
        for piece in pieces:
            emitted.append(cutter.push(piece))
            if cutter.has_stopped:
                return emitted, True
        return [*emitted, cutter.finish()], False

    def test_the_stop_string_may_be_kept(self) -> None:
        cutter = StopStrings(["STOP"], include_stop=True)
        assert [cutter.push(piece) for piece in ("one S", "T", "OP two")] == ["one ", "", "STOP"]
        assert cutter.has_stopped

    @pytest.mark.parametrize("stops", [["abc", "ab"], ["ab", "abc"]])
    def test_of_those_that_begin_alike_the_shortest_is_kept(self, stops: list[str]) -> None:
        cutter = StopStrings(stops, include_stop=True)
        assert cutter.push("xabcd") == "xab"

    def test_without_stop_strings_nothing_is_held(self) -> None:
        assert self.run([], ["ab", "c"]) == (["ab", "c", ""], False)

    def test_text_is_cut_before_the_stop_string(self) -> None:
        assert self.run(["STOP"], ["one STOP two"]) == (["one "], True)

    def test_a_stop_string_over_several_pieces_is_never_emitted(self) -> None:
        assert self.run(["STOP"], ["one S", "T", "OP two"]) == (["one ", "", ""], True)

    def test_a_false_start_is_emitted_once_it_is_one(self) -> None:
        assert self.run(["STOP"], ["a ST", "AY"]) == (["a ", "STAY", ""], False)

    def test_what_is_held_at_the_end_is_text(self) -> None:
        assert self.run(["STOP"], ["a STO"]) == (["a ", "STO"], False)

    def test_the_first_of_several_counts(self) -> None:
        assert self.run(["yy", "x"], ["ab x yy"]) == (["ab "], True)

    @pytest.mark.parametrize("seed", range(100))
    def test_any_split_gives_the_same(self, seed: int) -> None:
        rng = random.Random(seed)
        text = "".join(rng.choices("ab", k=30))
        stop = ["".join(rng.choices("ab", k=rng.randrange(1, 7))) for _ in range(2)]
        cuts = sorted(rng.choices(range(31), k=6))
        pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, 30], strict=True)]
        emitted, has_stopped = self.run(stop, pieces)
        found = [text.find(s) for s in stop if s in text]
        assert has_stopped == bool(found)
        assert "".join(emitted) == (text[: min(found)] if found else text)


class TestSplitText:
    @pytest.mark.parametrize("text", ["", "plain", "naïve 日本 👍🏽", "<|end|>a<|end|>"])
    def test_parts_make_the_text(self, text: str, tokenizer: Tokenizer) -> None:
        tokens = tokenizer.encode(text).ids
        parts = split_text(tokenizer, tokens, skip_special_tokens=False)
        assert len(parts) == len(tokens)
        assert "".join(parts) == text
        hidden = split_text(tokenizer, tokens)
        assert "".join(hidden) == text.replace("<|end|>", "")

    def test_a_character_is_the_text_of_its_last_token(self, tokenizer: Tokenizer) -> None:
        tokens = tokenizer.encode("a👍").ids
        assert split_text(tokenizer, tokens) == ("a", *[""] * (len(tokens) - 2), "👍")
        assert split_text(tokenizer, tokens[:-1])[-1] == "\N{REPLACEMENT CHARACTER}"


class TestUnstopped:
    def test_stop_strings_are_looked_for_from_a_token_on(self, tokenizer: Tokenizer) -> None:
        tokens = tokenizer.encode("ababab").ids
        assert len(tokens) == 6
        text = CompletionText(tokenizer, prompt=[], stop=["ab"], num_unstopped=3)
        parts = [text.push(token) for token in tokens[:4]]
        assert (parts, text.has_stopped) == (["a", "b", "a", "b"], False)
        assert [text.push(token) for token in tokens[4:]] == ["", ""]
        assert text.has_stopped
