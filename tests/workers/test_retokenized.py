"""Cutting a text by two tokenizers: never a wrong token, however odd the text."""

import random
import re
from collections.abc import Iterator, Sequence

import pytest

from tests.tokenizers import KINDS, TEXTS, wrapped
from workers.drafters import retokenized
from workers.drafters.histories import History, PieceHistory
from workers.drafters.retokenized import TextHistory, whole_characters
from workers.spelling import Encoder, Spelling
from workers.token_map import TokenMap

TOKENIZERS = {kind: wrapped(kind) for kind in KINDS}
SPELLINGS = {kind: Spelling(kind, tokenizer) for kind, tokenizer in TOKENIZERS.items()}
ENCODERS = {kind: Encoder(spelling) for kind, spelling in SPELLINGS.items()}
WITH_ALL_BYTES = ("byte level", "other byte level", "letters", "sentence piece")
PAIRS = [(ours, theirs) for ours in WITH_ALL_BYTES for theirs in KINDS if ours != theirs]
PADDING = 3
MAPS = {
    (ours, theirs): TokenMap(
        SPELLINGS[ours],
        SPELLINGS[theirs],
        target_tokenizer=TOKENIZERS[ours],
        draft_tokenizer=TOKENIZERS[theirs],
        target_size=len(TOKENIZERS[ours]) + PADDING,
        draft_size=len(TOKENIZERS[theirs]) + PADDING,
    )
    for ours, theirs in PAIRS
}

SPECIAL = ("<|end|>", "</s>", "<s>", "<unk>", "<0xE2>", "▁", "Ġ", "\ufffd")
ODD = ("\x00", "\u0301", "é", "京", "\u200d", "🙂", "\U0010fffd", "  ", "\n")


def cases(request: pytest.FixtureRequest) -> Iterator[random.Random]:
    """Random numbers for as many cases as `--cases` says."""
    for case in range(request.config.getoption("--cases")):
        yield random.Random(case)


def some_text(rng: random.Random) -> str:
    """Words, odd characters, and names of special tokens that are none here."""
    words = rng.choices(" ".join(TEXTS).split(" "), k=rng.randrange(6))
    odd = rng.choices([*ODD, *SPECIAL, chr(rng.randrange(0xD800))], k=rng.randrange(4))
    parts = words + odd
    rng.shuffle(parts)
    return rng.choice(["", " "]).join(parts)


def some_tokens(rng: random.Random, pair: tuple[str, str]) -> list[int]:
    """The cut of texts, and any of the target's tokens, special and padded ones among them."""
    tokens: list[int] = []
    for _ in range(rng.randrange(4)):
        cut = ENCODERS[pair[0]].encode(some_text(rng).encode())
        tokens += [token for token, _ in cut]
        tokens += rng.choices(range(MAPS[pair].target_size), k=rng.randrange(3))
        tokens += rng.choices([*SPELLINGS[pair[0]].special], k=rng.randrange(2))
    return tokens


def begin(pair: tuple[str, str], kind: str) -> History:
    if kind == "pieces":
        return PieceHistory(MAPS[pair])
    return TextHistory(MAPS[pair], target=ENCODERS[pair[0]], draft=ENCODERS[pair[1]])


def spell(kind: str, tokens: Sequence[int]) -> bytes:
    return b"".join(SPELLINGS[kind].bytes_of.get(token, b"") for token in tokens)


def test_an_encoder_cuts_text_as_its_tokenizer_does_but_sees_no_special_tokens(
    request: pytest.FixtureRequest,
) -> None:
    for rng in cases(request):
        kind, text = rng.choice(sorted(KINDS)), some_text(rng)
        raw = text.encode()
        cut = ENCODERS[kind].encode(raw, 7)
        assert not any(token in SPELLINGS[kind].special for token, _ in cut)
        ends = [end for _, end in cut]
        assert ends == sorted(set(ends))
        assert all(7 < end <= 7 + len(raw) for end in ends)
        tokens = [token for token, _ in cut]
        if kind in WITH_ALL_BYTES:
            assert spell(kind, tokens) in (raw, b" " + raw)
        if not any(mark in text for mark in SPECIAL):
            expected = TOKENIZERS[kind].encode(text, add_special_tokens=False)
            assert tokens == expected or kind in ("sentence piece", "words")


def test_bytes_that_are_no_text_are_cut_too(request: pytest.FixtureRequest) -> None:
    for rng in cases(request):
        data = some_text(rng).encode()[: rng.randrange(12)] + rng.randbytes(rng.randrange(6))
        for kind in WITH_ALL_BYTES:
            assert spell(kind, [t for t, _ in SPELLINGS[kind].cut(data)]) == data
            cut = spell(kind, [t for t, _ in ENCODERS[kind].encode(data)])
            assert cut == data or (kind == "sentence piece" and cut == b" " + data)


def test_a_text_that_goes_on_gets_no_space() -> None:
    """Behind a part of a character neither, where a text may be cut anew from there on."""
    text = "\u0301jumpsééé京".encode()
    tokens = [token for token, _ in ENCODERS["letters"].encode(text)]
    for num_known in range(len(tokens)):
        history = begin(("letters", "sentence piece"), "text")
        history.update(0, tokens[:num_known])
        history.update(num_known, tokens[num_known:])
        assert spell("sentence piece", history.draft_tokens) in (text, b" " + text)


def test_whole_characters(request: pytest.FixtureRequest) -> None:
    for rng in cases(request):
        raw = some_text(rng).encode()
        raw = raw[: max(0, len(raw) - rng.randrange(4))]
        whole = whole_characters(raw)
        assert raw.startswith(whole)
        assert whole.decode() == raw.decode(errors="ignore")


@pytest.mark.parametrize("kind", ["pieces", "text"])
def test_a_history_says_the_text_whatever_was_said_before(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """Through commits, assumptions and rejections: the same bytes, but for a space where a text
    begins if a tokenizer adds it there, and which tokens belong to which."""
    for rng in cases(request):
        pair = rng.choice(PAIRS)
        history, tokens = begin(pair, kind), list[int]()
        before: list[int] = []
        for _ in range(4):
            base_len = rng.randint(max(0, len(tokens) - 9), len(tokens))
            tokens = tokens[:base_len] + some_tokens(rng, pair)
            num_unchanged = history.update(base_len, tokens[base_len:])
            assert history.given == tokens
            assert history.draft_tokens[:num_unchanged] == before[:num_unchanged]
            before = list(history.draft_tokens)
            check_history(history, pair, kind)


def check_history(history: History, pair: tuple[str, str], kind: str) -> None:
    target, draft = pair
    tokens, drafts = history.given, history.draft_tokens
    if draft in WITH_ALL_BYTES:
        added = b" ?" if kind == "text" and draft == "sentence piece" else b""
        parts = [b""]
        for token in tokens:
            spelling = SPELLINGS[target].bytes_of.get(token)
            if spelling is None:
                parts.append(b"")
            else:
                parts[-1] += spelling
        meant = b"".join(added + re.escape(part) for part in parts)
        assert re.fullmatch(meant, spell(draft, drafts))
    expected = [
        piece
        for index, token in enumerate(tokens)
        if token not in SPELLINGS[target].bytes_of
        for piece in MAPS[pair].pieces(token, is_first=index == 0)
    ]
    assert [t for t in drafts if t in SPELLINGS[draft].special] == expected
    lens = [history.draft_len(count) for count in range(len(tokens) + 1)]
    assert lens == sorted(lens)
    assert lens[-1] <= len(drafts)
    for length in range(1, len(drafts) + 1):
        assert lens[history.num_said(length)] <= length


def test_drafts_spell_what_was_drafted(request: pytest.FixtureRequest) -> None:
    for rng in cases(request):
        pair = rng.choice(PAIRS)
        target, draft = pair
        history = begin(pair, "text")
        assert isinstance(history, TextHistory)
        history.update(0, some_tokens(rng, pair))
        drafts = some_tokens(rng, (draft, target)) if draft in WITH_ALL_BYTES else []
        drafts += rng.choices(range(MAPS[pair].draft_size), k=rng.randrange(4))
        check_drafts(history, drafts, pair)


def check_drafts(history: TextHistory, drafts: Sequence[int], pair: tuple[str, str]) -> None:
    target, draft = pair
    tokens, confidences = history.to_target(drafts, [0.99] * len(drafts))
    special = next((i for i, t in enumerate(drafts) if t not in SPELLINGS[draft].bytes_of), None)
    drafted = spell(draft, drafts[:special])
    assert drafted.startswith(spell(target, tokens))
    assert all(0 <= token < MAPS[pair].target_size for token in tokens)
    assert len(tokens) == len(confidences)
    assert all(0.0 < confidence <= 1.0 for confidence in confidences)
    assert all(token in SPELLINGS[target].bytes_of for token in tokens[:-1])
    if tokens and tokens[-1] not in SPELLINGS[target].bytes_of:
        assert special is not None
        assert spell(target, tokens) == drafted
        assert MAPS[pair].draft_of[tokens[-1]] == drafts[special]
    try:
        spell(target, history.given).decode()
        is_text = drafted.decode() != ""
    except UnicodeDecodeError:
        is_text = False
    if is_text:  # all of it can be said
        assert spell(target, tokens) == drafted


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_shared_tokens_spell_the_same(pair: tuple[str, str]) -> None:
    token_map = MAPS[pair]
    assert len(set(token_map.draft_of.values())) == len(token_map.draft_of) > 0
    for ours, theirs in token_map.draft_of.items():
        spelling = token_map.target.bytes_of.get(ours)
        assert spelling == token_map.draft.bytes_of.get(theirs)
        assert (spelling is None) == (theirs in token_map.draft.special)


def cut_word_by_word(look_behind: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a text that comes token by token is cut as it is when it comes at once."""
    monkeypatch.setattr(retokenized, "LOOK_BEHIND", look_behind)
    pair = ("letters", "byte level")
    tokens = [token for token, _ in ENCODERS["letters"].encode("".join(TEXTS).encode())]
    at_once, bit_by_bit = begin(pair, "text"), begin(pair, "text")
    at_once.update(0, tokens)
    for index, token in enumerate(tokens):
        bit_by_bit.update(index, [token])
    return at_once.draft_tokens == bit_by_bit.draft_tokens


def test_a_text_is_cut_alike_however_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cut_word_by_word(retokenized.LOOK_BEHIND, monkeypatch)
    assert not cut_word_by_word(1, monkeypatch)
