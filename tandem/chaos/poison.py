"""Requests that must harm nobody: legal ones at the edge, wrong ones, and clients that hang up."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import httpx

HUGE_PROMPT = 2_000_000
"""The number of characters of a prompt that is longer than any context."""
MANY_NESTED = 50_000
HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Poison:
    name: str
    body: bytes
    hang_up_s: float | None = None
    """Seconds after which the client leaves; None if it hears the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoisonAnswer:
    name: str
    status: int
    """The status of the answer; 0 for a client that left."""
    text: str = ""

    @property
    def is_right(self) -> bool:
        return self.status < 500


def make_poisons(model: str, *, vocab_size: int, max_model_len: int) -> tuple[Poison, ...]:
    """One request of each kind."""
    last = vocab_size - 1
    legal: dict[str, dict[str, Any]] = {
        "the highest seed, twice": {"seed": 2**63 - 1, "n": 2},
        "the lowest seed, greedily": {"seed": -(2**63), "n": 3, "temperature": 0},
        "a penalty of nearly nothing": {"repetition_penalty": 1e-40},
        "the highest penalties": {
            "repetition_penalty": 10,
            "presence_penalty": 2,
            "frequency_penalty": 2,
        },
        "the lowest penalties": {"presence_penalty": -2, "frequency_penalty": -2},
        "a temperature of nearly nothing": {"temperature": 5e-324},
        "a cut of nearly everything": {"top_p": 5e-324, "min_p": 1, "top_k": 10**30},
        "the last token alone": {"logit_bias": {str(last): 100}},
        "no token at all": {"logit_bias": {str(token): -100 for token in range(vocab_size)}},
        "a prompt of the last ids": {"prompt": [last, last - 1, last - 2, last]},
        "a prompt as long as the context": {
            "prompt": [token % vocab_size for token in range(max_model_len - 8)]
        },
        "a huge prompt": {"prompt": "a " * (HUGE_PROMPT // 2)},
        "a prompt of an unknown id": {"prompt": [vocab_size]},
        "a prompt of an id below 0": {"prompt": [-1]},
        "a prompt of an id beyond 64 bits": {"prompt": [2**70]},
        "an unknown field": {"temprature": 1.0},
        "too many completions": {"n": 10**6},
        "a temperature that is no number": {"temperature": float("nan")},
        "half of a character": {"prompt": "a\ud800b"},
        "many stop strings": {"stop": [chr(33 + index) for index in range(16)]},
    }
    poisons = [_of_fields(model, name, fields) for name, fields in legal.items()]
    raw = {
        "no JSON": b'{"model": ',
        "no object": b"[]",
        "no UTF-8": b'{"model": "\xff\xfe"}',
        "deeply nested": b'{"prompt": ' + b"[" * MANY_NESTED + b"]" * MANY_NESTED + b"}",
    }
    poisons += [Poison(name=name, body=body) for name, body in raw.items()]
    for delay_s in (0.01, 0.05, 0.2, 1.0):
        name = f"a client that leaves after {delay_s:g} s"
        long = _of_fields(model, name, {"max_tokens": 500, "stream": True, "ignore_eos": True})
        poisons.append(Poison(name=name, body=long.body, hang_up_s=delay_s))
    return tuple(poisons)


def _of_fields(model: str, name: str, fields: dict[str, Any]) -> Poison:
    request = {"model": model, "prompt": "def f(", "max_tokens": 8, "seed": 1, **fields}
    return Poison(name=name, body=json.dumps(request).encode())


async def send_poison(client: httpx.AsyncClient, poison: Poison) -> PoisonAnswer:
    """Raises httpx.TransportError where the connection breaks."""
    try:
        async with asyncio.timeout(poison.hang_up_s):
            response = await client.post("/v1/completions", content=poison.body, headers=HEADERS)
    except TimeoutError:  # of our own: httpx has another
        return PoisonAnswer(name=poison.name, status=0)
    return PoisonAnswer(name=poison.name, status=response.status_code, text=response.text)
