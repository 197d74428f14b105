"""Extreme but legal requests: each is answered, alike with and without drafts, and hurts nobody."""

import asyncio
import random
from typing import Any

from tests.deployments.loops import Models
from tests.deployments.serving import LocalServing, client_of, complete, local_serving, stream

NUM_REQUESTS = 30
NUM_AT_A_TIME = 12


def extreme_request(rng: random.Random) -> dict[str, Any]:
    """Each field is left out, at one of its ends, or next to it."""
    ends: dict[str, list[Any]] = {
        "temperature": [0, 1e-320, 9.9e-6, 1e-5, 1e-4, 2],
        "top_p": [1e-300, 1e-9, 0.999999, 1],
        "top_k": [-1, 0, 1, 2, 96, 97, 10**12],
        "min_p": [0, 1e-300, 1],
        "repetition_penalty": [0.1, 10],
        "presence_penalty": [-2, 2],
        "frequency_penalty": [-2, 2],
        "seed": [-(2**63), -1, 0, 2**32, 2**63 - 1],
        "n": [1, 2],
        "stop": ["zzz", ["a", "ab", "b"], [chr(40 + n) for n in range(16)]],
        "ignore_eos": [False, True],
        "logit_bias": [
            {},
            {"0": -100, "96": 100},
            {str(token): -100 for token in range(97)},
            {str(token): 100 for token in range(0, 97, 2)},
        ],
        "max_tokens": [1, 2, 12],
        "prompt": ["~", "ab" * 30, ["a", "b"], [[96], [0, 0, 0]]],
        "cache_salt": ["", "s" * 256],
    }
    chosen = rng.sample(sorted(ends), k=rng.randint(2, len(ends)))
    return {"seed": rng.getrandbits(40), **{name: rng.choice(ends[name]) for name in chosen}}


async def answers(serving: LocalServing, requests: list[dict[str, Any]]) -> list[Any]:
    """Texts and reasons, of requests that run some at a time."""
    slots = asyncio.Semaphore(NUM_AT_A_TIME)
    async with client_of(serving) as client:

        async def answer(fields: dict[str, Any]) -> Any:
            async with slots:
                whole = await complete(client, **fields)
            return [(choice["text"], choice["finish_reason"]) for choice in whole["choices"]]

        async with asyncio.timeout(120):
            return await asyncio.gather(*[answer(fields) for fields in requests])


async def test_extreme_requests_are_answered_as_without_drafts_and_hurt_nobody(
    models: Models,
) -> None:
    rng = random.Random(7)
    requests = [extreme_request(rng) for _ in range(NUM_REQUESTS)]
    async with (
        local_serving(models.target, gamma=0) as plain,
        local_serving(models.target, gamma=4) as drafted,
        client_of(plain) as plain_client,
        client_of(drafted) as drafted_client,
    ):
        long = {"prompt": "innocent", "max_tokens": 150}
        alone = await complete(plain_client, **long)
        bystander = asyncio.create_task(stream(drafted_client, **long))
        got = await answers(drafted, requests)
        events = await bystander
        assert "".join(e["choices"][0]["text"] for e in events) == alone["choices"][0]["text"]
        expected = await answers(plain, requests)
        for fields, with_drafts, without in zip(requests, got, expected, strict=True):
            assert with_drafts == without, fields
        await drafted.wait_until_nothing_is_held()
