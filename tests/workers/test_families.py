"""Every kind of model: with any drafts its text is that of transformers alone."""

import random
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from tests.tiny_configs import SERVED, VOCAB_SIZE
from tests.workers.decoding import CACHE, generate, make_prompt
from workers.model import Model
from workers.target import Target

NUM_TOKENS = 12


@pytest.mark.parametrize("family", sorted(SERVED))
def test_text_is_that_of_generate_with_any_drafts(
    family: str,
    tiny_model: Callable[..., Model],
    reference: Callable[[Model], PreTrainedModel],
) -> None:
    model, prompt, rng = tiny_model(family), make_prompt(3, 21), random.Random(0)
    expected = (
        reference(model)
        .generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )[0, len(prompt) :]
        .tolist()
    )
    text = [*prompt, *expected]

    def drafts(_: str, tokens: list[int]) -> list[int]:
        right = text[len(tokens) : len(tokens) + rng.randrange(5)]
        return right + rng.choices(range(VOCAB_SIZE), k=rng.randrange(4))

    assert generate(Target(model, CACHE), prompt, NUM_TOKENS) == expected
    in_chunks = Target(model, CACHE, max_batched_tokens=16)
    assert generate(in_chunks, prompt, NUM_TOKENS, drafts=drafts, forget_every=4) == expected
