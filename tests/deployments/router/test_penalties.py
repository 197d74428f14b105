"""Penalties under speculation: they count the tokens of the text, whatever was drafted.

Elsewhere they counted a token per step (the better the draft, the weaker the penalty), rejected
drafts too, or accepted ones twice.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import DynamicCache

from deployments.router.sequence import GenerationParams
from tests.deployments.loops import Models, Stream, model_drafts, run_all, running_loop
from tests.tiny_models import load_reference
from workers.sampling_params import SamplingParams

Reference = Callable[[Sequence[int], dict[str, float]], list[int]]

PROMPT = (5, 6, 7, 8) * 5
NUM_TOKENS = 40
SETTINGS = {
    "none": {},
    "frequency": {"frequency_penalty": 1.5},
    "least frequency": {"frequency_penalty": -2.0},
    "most frequency": {"frequency_penalty": 2.0},
    "presence": {"presence_penalty": 1.5},
    "repetition": {"repetition_penalty": 1.3},
    "all": {"frequency_penalty": 1.5, "presence_penalty": 1.5, "repetition_penalty": 1.3},
}


async def texts(models: Models, *, gamma: int) -> tuple[dict[str, list[int]], list[Stream]]:
    """The tokens of every setting, all at a time, and their streams."""
    params = [
        GenerationParams(
            prompt=PROMPT,
            max_tokens=NUM_TOKENS,
            sampling=SamplingParams(temperature=0.0, **penalties),
            seed=seed,
            ignore_eos=True,
        )
        for seed, penalties in enumerate(SETTINGS.values())
    ]
    drafts = model_drafts(models) if gamma else None
    async with running_loop(models, gamma=gamma, drafts=drafts, max_gamma=8) as (loop, _, _):
        streams = await run_all(loop, params, concurrency=len(params))
    return dict(zip(SETTINGS, (s.token_ids for s in streams), strict=True)), streams


@pytest.fixture
def reference(models: Models) -> Reference:
    """Greedy tokens by the definition, from the logits of transformers' own forward."""
    model = load_reference(models.target.name)

    def write(prompt: Sequence[int], penalties: dict[str, float]) -> list[int]:
        tokens, newest, cache = list(prompt), list(prompt), DynamicCache()
        while len(tokens) < len(prompt) + NUM_TOKENS:
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
    models: Models, reference: Reference
) -> None:
    """Every setting has accepted drafts, and all of them together have rejected ones."""
    plain, _ = await texts(models, gamma=0)
    drafted, streams = await texts(models, gamma=8)
    assert drafted == plain
    counts = [stream.sequence.counts for stream in streams]
    assert min(each.num_accepted for each in counts) > NUM_TOKENS / 4
    assert sum(each.num_tested - each.num_accepted for each in counts) > NUM_TOKENS / 4
    assert plain["most frequency"] != plain["least frequency"]
    assert len({tuple(tokens) for tokens in plain.values()}) >= len(SETTINGS) - 1
    for name, penalties in SETTINGS.items():
        assert plain[name] == reference(PROMPT, penalties), name
