"""Penalties under speculation: they count the tokens of the text, whatever was drafted.

Elsewhere they counted a token per step (the better the draft, the weaker the penalty), rejected
drafts too, or accepted ones twice.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from cluster import bundled
from deployments.router.sequence import GenerationParams
from tests.deployments.loops import Models, model_drafts, run_all, running_loop
from workers.model import load_model
from workers.types import SamplingParams

Reference = Callable[[Sequence[int], dict[str, float]], list[int]]

PROMPT = "a = 1\n" * 20
"""It goes on with itself, so that drafts are accepted and penalties change it."""
NUM_TOKENS = 128
NUM_REFERENCE_TOKENS = 32
SETTINGS = {
    "none": {},
    "frequency": {"frequency_penalty": 1.5},
    "least frequency": {"frequency_penalty": -2.0},
    "most frequency": {"frequency_penalty": 2.0},
    "presence": {"presence_penalty": 1.5},
    "repetition": {"repetition_penalty": 1.3},
    "all": {"frequency_penalty": 1.5, "presence_penalty": 1.5, "repetition_penalty": 1.3},
}


@pytest.fixture(scope="module")
def pair() -> Models:
    target, draft = map(bundled.resolve, (bundled.TARGET_NAME, bundled.DRAFT_NAME))
    return Models(
        target=load_model(target, dtype="float32"), draft=load_model(draft, dtype="float32")
    )


@pytest.fixture(scope="module")
def prompt() -> tuple[int, ...]:
    tokenizer = AutoTokenizer.from_pretrained(bundled.resolve(bundled.TARGET_NAME))
    return tuple(tokenizer.encode(PROMPT))


async def texts(
    pair: Models, prompt: tuple[int, ...], *, gamma: int
) -> tuple[dict[str, list[int]], int]:
    """The tokens of every setting, all at a time, and how many drafts were accepted."""
    params = [
        GenerationParams(
            prompt=prompt,
            max_tokens=NUM_TOKENS,
            sampling=SamplingParams(temperature=0.0, **penalties),
            seed=seed,
            ignore_eos=True,
        )
        for seed, penalties in enumerate(SETTINGS.values())
    ]
    drafts = model_drafts(pair) if gamma else None
    async with running_loop(pair, gamma=gamma, drafts=drafts, max_gamma=8) as (loop, _, _):
        streams = await run_all(loop, params, concurrency=len(params))
    num_accepted = sum(stream.sequence.counts.num_accepted for stream in streams)
    return dict(zip(SETTINGS, (s.token_ids for s in streams), strict=True)), num_accepted


@pytest.fixture(scope="module")
def reference() -> Reference:
    """Greedy tokens by the definition, from the logits of transformers' own forward."""
    model = AutoModelForCausalLM.from_pretrained(
        bundled.resolve(bundled.TARGET_NAME), dtype=torch.float32
    )

    def write(prompt: Sequence[int], penalties: dict[str, float]) -> list[int]:
        tokens, newest, cache = list(prompt), list(prompt), DynamicCache()
        while len(tokens) < len(prompt) + NUM_REFERENCE_TOKENS:
            with torch.no_grad():
                logits = model(torch.tensor([newest]), past_key_values=cache).logits[0, -1]
            newest = [penalised(logits, tokens, len(prompt), penalties)]
            tokens += newest
        return tokens[len(prompt) :]

    return write


def penalised(
    logits: torch.Tensor, tokens: Sequence[int], prompt_len: int, penalties: dict[str, float]
) -> int:
    """The likeliest token behind these."""
    for token in set(tokens):
        factor = penalties.get("repetition_penalty", 1.0)
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    output = tokens[prompt_len:]
    for token in set(output):
        logits[token] -= penalties.get("presence_penalty", 0.0)
        logits[token] -= penalties.get("frequency_penalty", 0.0) * output.count(token)
    return int(logits.argmax())


async def test_drafts_change_nothing_of_what_penalties_do(
    pair: Models, prompt: tuple[int, ...], reference: Reference
) -> None:
    plain, _ = await texts(pair, prompt, gamma=0)
    drafted, num_accepted = await texts(pair, prompt, gamma=8)
    assert drafted == plain
    assert num_accepted > NUM_TOKENS
    assert plain["most frequency"] != plain["least frequency"]
    assert len({tuple(tokens) for tokens in plain.values()}) >= len(SETTINGS) - 1
    for name, penalties in SETTINGS.items():
        assert plain[name][:NUM_REFERENCE_TOKENS] == reference(prompt, penalties), name
