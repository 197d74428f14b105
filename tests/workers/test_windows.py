"""Rolling back drafts across the edge of a sliding window, or of a chunk, changes no text."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import PreTrainedModel

from tests.tiny_configs import VOCAB_SIZE
from tests.workers.decoding import CACHE, GREEDY, Drafts, generate, make_prompt
from workers.drafters.model import ModelDrafter
from workers.errors import ConfigError
from workers.model import Model
from workers.paged_model import CacheOptions
from workers.target import Target
from workers.types import ProposeRequest

WINDOW = 16
NUM_TOKENS = 14
GAMMA = 8
NUM_SHARED = 12
PROMPT_LENS = (10, 15, 17, 22)
EDGES = {
    "gemma3": "sliding_window",
    "mistral": "sliding_window",
    "gpt_oss": "sliding_window",
    "llama4": "attention_chunk_size",
}


def half_wrong(drafter: ModelDrafter) -> Drafts:
    """What the drafter proposes from its own cache, spoilt every other time."""
    cached_len: dict[str, int] = {}
    rng = random.Random(5)

    def propose(seq_id: str, tokens: Sequence[int]) -> list[int]:
        base_len = cached_len.get(seq_id, 0)
        while True:
            (result,) = drafter.propose(
                [
                    ProposeRequest(
                        seq_id=seq_id,
                        base_len=base_len,
                        new_tokens=tuple(tokens[base_len:]),
                        k=GAMMA,
                        prompt_len=1,
                        sampling=GREEDY,
                    )
                ]
            )
            if result.needs_tokens_from is None:
                break
            base_len = result.needs_tokens_from
        cached_len[seq_id] = len(tokens)
        drafts = list(result.draft_tokens)
        if drafts and rng.random() < 0.5:
            spoilt = rng.randrange(len(drafts))
            drafts[spoilt] = (drafts[spoilt] + 1) % VOCAB_SIZE
        return drafts

    return propose


@pytest.mark.parametrize("family", EDGES)
def test_texts_across_the_edge_are_those_of_transformers(
    family: str,
    tiny_model: Callable[..., Model],
    reference: Callable[[Model], PreTrainedModel],
) -> None:
    """Prompts share their beginning, which the second finds in the cache of prefixes."""
    model = tiny_model(family, **{EDGES[family]: WINDOW})
    with_drafts = Target(model, CACHE)
    drafts = half_wrong(ModelDrafter(model, CACHE))
    shared = make_prompt(1, NUM_SHARED)
    for length in PROMPT_LENS:
        prompt = (shared + make_prompt(length, length))[:length]
        plain = generate(Target(model, CACHE), prompt, NUM_TOKENS)
        with torch.inference_mode():
            logits = reference(model)(torch.tensor([prompt + plain]), use_cache=False).logits[0]
        assert plain == logits[length - 1 : -1].argmax(-1).tolist()
        name = f"{family}-{length}"
        assert generate(with_drafts, prompt, NUM_TOKENS, drafts=drafts, seq_id=name) == plain


@pytest.mark.parametrize("family", EDGES)
def test_drafts_across_the_edge_are_those_of_a_new_drafter(
    family: str, tiny_model: Callable[..., Model]
) -> None:
    """As the draft's own model is the target, each of its drafts is right if its cache is."""
    model = tiny_model(family, **{EDGES[family]: WINDOW})
    drafter = ModelDrafter(model, CACHE)
    prompt = make_prompt(2, WINDOW - 3)
    plain = generate(Target(model, CACHE), prompt, NUM_TOKENS)
    tokens, base_len = list(prompt), 0
    while len(tokens) < len(prompt) + NUM_TOKENS - GAMMA:
        (result,) = drafter.propose(
            [
                ProposeRequest(
                    seq_id="s",
                    base_len=base_len,
                    new_tokens=tuple(tokens[base_len:]),
                    k=GAMMA,
                    prompt_len=len(prompt),
                    sampling=GREEDY,
                )
            ]
        )
        done = len(tokens) - len(prompt)
        assert list(result.draft_tokens) == plain[done : done + GAMMA]
        base_len = len(tokens)
        tokens += plain[done : done + 3]  # what was drafted beyond it has to go


def test_blocks_reach_over_no_edge_of_a_chunk(tiny_model: Callable[..., Model]) -> None:
    with pytest.raises(ConfigError, match=r"block_size is 12, but .* chunks of 16 .*block_size=4"):
        Target(tiny_model("llama4", attention_chunk_size=WINDOW), CacheOptions(block_size=12))


def test_a_chunk_that_no_text_is_longer_than_is_none(tiny_model: Callable[..., Model]) -> None:
    """So that the forward can be compiled, which no chunk begins in."""
    model = tiny_model("llama4", attention_chunk_size=WINDOW)
    longer = Target(model, CACHE)
    assert "how many chunks" in str(longer._paged.model.irregularity)
    short = Target(model, CacheOptions(block_size=5, max_model_len=WINDOW))
    assert short._paged.model.irregularity is None
    prompt = make_prompt(4, WINDOW // 2)
    assert generate(short, prompt, WINDOW // 2) == generate(longer, prompt, WINDOW // 2)
