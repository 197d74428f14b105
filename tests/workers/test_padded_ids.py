"""Embeddings are larger than vocabularies: an id without a token is a legal arg-max."""

import dataclasses
from pathlib import Path

import pytest

from tests.tiny_models import VOCAB_SIZE, save_model, save_tokenizer
from tests.workers.decoding import CACHE, GREEDY, generate
from workers.model import load_model
from workers.target import Target
from workers.tokenizer import find_tokenizer


@pytest.mark.parametrize("gamma", [0, 4])
def test_a_padded_id_is_a_token_without_text(gamma: int, tmp_path: Path) -> None:
    name = save_model(tmp_path)
    save_tokenizer(tmp_path, ["unknown", "a", "b"])
    padded = VOCAB_SIZE - 1
    sampling = dataclasses.replace(GREEDY, logit_bias=((padded, 100.0),))
    target = Target(load_model(name, dtype="float32", device="cpu"), CACHE)
    tokens = generate(target, [1, 2, 1], 4, sampling=sampling, drafts=lambda *_: [padded] * gamma)
    assert tokens == [padded] * 4
    tokenizer = find_tokenizer(name)
    assert tokenizer is not None
    assert tokenizer.decode(tokens, skip_special_tokens=True) == ""
