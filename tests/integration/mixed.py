"""Requests of every kind in one batch: each way to draft, with a spread of parameters."""

import asyncio
from collections import Counter
from itertools import cycle
from typing import Any

import httpx

from tests.integration.conftest import HEADERS, Served, request

NUM_REQUESTS = 16
NUM_TOKENS = 16
CHAIN = "prompt_lookup,suffix,model,early_exit"
DRAFTERS: dict[str, Any] = {"drafter": CHAIN, "early_exit_layer": 2}
"""The options of an app that serves these requests."""
SPECULATIONS: tuple[dict[str, Any], ...] = (
    {},
    *[{"mode": name} for name in CHAIN.split(",")],
    {"mode": "predicted"},
    {"mode": "off"},
    {"mode": "model", "num_speculative_tokens": 2},
)
PARAMETERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.8, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 0.8, "logprobs": 3, "prompt_logprobs": 1},
    {"temperature": 0.8, "stop": ["\n\n", "return"], "min_tokens": 4},
    {"temperature": 0, "logit_bias": {"20": 5, "30": -100}, "bad_words": ["self"]},
    {"temperature": 0.8, "guided_regex": "[a-z ]{20,60}"},
    {"temperature": 0.8, "n": 2, "ignore_eos": True},
    {"temperature": 0, "max_tokens": 1},
)
"""Their number and that of the ways to speculate have no common divisor, so that each way meets
other parameters each time."""


def mixed_requests(prompts: list[str]) -> list[dict[str, Any]]:
    """Their bodies, one for each of the first prompts.

    What is predicted is the prompt over again, of which a little is right.
    """
    ways = zip(prompts[:NUM_REQUESTS], cycle(SPECULATIONS), cycle(PARAMETERS), strict=False)
    bodies = []
    for seed, (prompt, speculation, parameters) in enumerate(ways):
        fields = {"max_tokens": NUM_TOKENS, "seed": seed, "return_token_ids": True, **parameters}
        if speculation.get("mode") == "predicted":
            fields["prediction"] = {"type": "content", "content": prompt}
        bodies.append(request(prompt, **fields, speculation=speculation))
    return bodies


async def answers(served: Served, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers to all bodies, asked for at once."""
    async with httpx.AsyncClient(base_url=served.url, headers=HEADERS, timeout=300) as client:
        responses = await asyncio.gather(
            *[client.post("/v1/completions", json=body) for body in bodies]
        )
    return [response.raise_for_status().json() for response in responses]


def token_ids(answer: dict[str, Any]) -> list[list[int]]:
    """The token ids of each completion of an answer."""
    return [choice["token_ids"] for choice in answer["choices"]]


def speculation_of(answer: dict[str, Any]) -> dict[str, Any]:
    """The counts of its rounds."""
    counts: dict[str, Any] = answer["usage"]["speculation"]
    return counts


async def check_that_drafts_change_nothing(served: Served, prompts: list[str]) -> None:
    """The requests are sent without drafts first, so that later ones draft from finished texts.

    The app has to draft a fixed number of tokens, so that each way to draft does.
    """
    bodies = mixed_requests(prompts)
    plain = await answers(served, [{**body, "speculation": {"mode": "off"}} for body in bodies])
    drafted = await answers(served, bodies)
    for body, answer, expected in zip(bodies, drafted, plain, strict=True):
        assert token_ids(answer) == token_ids(expected), body
    drafts, accepted = Counter[str](), Counter[str]()
    for body, answer in zip(bodies, drafted, strict=True):
        mode, counts = body["speculation"].get("mode", "auto"), speculation_of(answer)
        drafts[mode] += counts["drafted_tokens"]
        accepted[mode] += counts["accepted_tokens"]
    assert not any(speculation_of(answer)["drafted_tokens"] for answer in plain)
    assert drafts.pop("off") == 0
    assert len(drafts) == len(CHAIN.split(",")) + 2  # auto and predicted
    assert min(drafts.values()) > 0, drafts
    assert min(accepted[mode] for mode in ("auto", "model", "suffix", "predicted")) > 0, accepted
