"""A completion's token records: their texts are its text, however rounds cut its tokens."""

import random
from itertools import accumulate

import pytest
from tokenizers import Tokenizer

from deployments.router.sequence import (
    Delta,
    FinishReason,
    GenerationParams,
    Origin,
    Sequence,
    TokenRecord,
)
from tests.fakes import END, byte_tokenizer
from workers.errors import TandemError
from workers.sampling_params import SamplingParams
from workers.types import VerifyResult

CHARACTERS = "abc \n" + "naïve é 日本語 漢字かな 👩‍👩‍👧‍👦 🇩🇪 👍🏽 مرحبا"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer([CHARACTERS])


def write(
    tokenizer: Tokenizer,
    tokens: list[int],
    sizes: list[int],
    *,
    stop: list[str],
    max_tokens: int,
    prompt: list[int],
) -> list[Delta]:
    """The deltas of a completion whose tokens come in commits of these sizes."""
    deltas: list[Delta] = []

    def emit(delta: Delta | TandemError) -> None:
        assert isinstance(delta, Delta)
        deltas.append(delta)

    params = GenerationParams(
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        sampling=SamplingParams(),
        seed=0,
        stop=tuple(stop),
    )
    sequence = Sequence(
        "s", params, decoder=tokenizer, eos_token_ids=[tokenizer.token_to_id(END)], emit=emit
    )
    for start, end in zip([0, *accumulate(sizes)], accumulate(sizes), strict=False):
        if not sequence.is_done:
            sequence.commit(VerifyResult(seq_id="s", tokens=tuple(tokens[start:end])))
    return deltas


def cut(rng: random.Random, num_tokens: int) -> list[int]:
    """Commits of 1 to 8 tokens that take in all of them."""
    sizes: list[int] = []
    while sum(sizes) < num_tokens:
        sizes.append(min(rng.randint(1, 8), num_tokens - sum(sizes)))
    return sizes


def expected_text(
    tokenizer: Tokenizer, prompt: list[int], tokens: list[int], stop: list[str]
) -> str:
    """What the tokens add to the prompt's text when all are decoded at once, up to a stop string.

    A character that the prompt began, of which it shows a replacement, is the completion's.
    """
    start, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + tokens)
    num_known = next((i for i in range(len(start)) if not whole.startswith(start[: i + 1])), None)
    text = whole[len(start) if num_known is None else num_known :]
    found = [text.find(string) for string in stop if string in text]
    return text[: min(found)] if found else text


@pytest.mark.parametrize("seed", range(200))
def test_any_cut_into_commits_makes_the_same_records(seed: int, tokenizer: Tokenizer) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices(CHARACTERS, k=40))
    tokens = tokenizer.encode(text).ids
    if seed % 4 == 0:  # broken characters
        tokens = rng.choices(range(tokenizer.get_vocab_size()), k=60)
    elif seed % 4 == 1:
        tokens = [*tokens, tokenizer.token_to_id(END)]
    start = rng.randrange(len(text))
    stop = [[], [text[start : start + 3]], [text[start : start + 2] + "~", "never"]][seed % 3]
    max_tokens = rng.choice([len(tokens), max(1, len(tokens) // 2)])
    prompt = tokenizer.encode(rng.choice(["", "a", "日"])).ids + tokens[: rng.randrange(3)]
    options = {"stop": stop, "max_tokens": max_tokens, "prompt": prompt}
    one_by_one = Delta.join(write(tokenizer, tokens, [1] * len(tokens), **options))
    for _ in range(4):
        deltas = write(tokenizer, tokens, cut(rng, len(tokens)), **options)
        assert Delta.join(deltas) == one_by_one
        assert "".join(delta.text for delta in deltas) == one_by_one.text
    offsets = accumulate((len(record.text) for record in one_by_one.records), initial=0)
    assert [record.text_offset for record in one_by_one.records] == list(offsets)[:-1]
    assert one_by_one.text == expected_text(tokenizer, prompt, list(one_by_one.token_ids), stop)


def test_text_is_cut_at_a_stop_string_over_several_commits(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("one STOP two").ids
    deltas = write(tokenizer, tokens, [1] * len(tokens), stop=["STOP"], max_tokens=100, prompt=[])
    assert deltas[-1].finish_reason is FinishReason.STOP
    records = Delta.join(deltas).records
    assert [record.text for record in records] == ["o", "n", "e", " ", "", "", "", ""]
    assert [record.text_offset for record in records] == [0, 1, 2, 3, 4, 4, 4, 4]


def test_what_was_held_back_is_the_text_of_the_token_that_settles_it(
    tokenizer: Tokenizer,
) -> None:
    tokens = tokenizer.encode("a STAY").ids
    options = {"stop": ["STOP"], "max_tokens": 100, "prompt": []}
    records = Delta.join(write(tokenizer, tokens, [len(tokens)], **options)).records
    assert [record.text for record in records] == ["a", " ", "", "", "STA", "Y"]
    held = Delta.join(write(tokenizer, tokens[:4], [4], **{**options, "max_tokens": 4})).records
    assert [record.text for record in held] == ["a", " ", "", "ST"]


def test_records_say_which_tokens_were_drafted_and_by_whom(tokenizer: Tokenizer) -> None:
    records: list[TokenRecord] = []
    sequence = Sequence(
        "s",
        GenerationParams(prompt=(5,), max_tokens=9, sampling=SamplingParams(), seed=0),
        decoder=tokenizer,
        eos_token_ids=(),
        emit=lambda delta: records.extend(delta.records),  # type: ignore[union-attr]
    )
    first = VerifyResult(seq_id="s", tokens=(10, 11, 12), num_accepted=2)
    assert sequence.commit(first, source="prompt_lookup") == 3
    assert sequence.commit(VerifyResult(seq_id="s", tokens=(13, 14, 15))) == 3
    assert [(record.origin, record.source) for record in records] == [
        *[(Origin.ACCEPTED, "prompt_lookup")] * 2,
        *[(Origin.OWN, "")] * 4,
    ]
