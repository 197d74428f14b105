"""A load of streaming completions, and what it measured."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import httpx


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests to send, closed loop."""

    prompts: Sequence[str]
    max_tokens: int
    temperature: float
    concurrency: int
    cache_salt: str
    """A new one for each load, or its prompts would be in the prefix cache already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """Times in seconds, from a request's start."""

    num_tokens: int
    elapsed_s: float
    time_to_first_s: tuple[float, ...]
    chunk_gaps_s: tuple[float, ...]
    """Between two chunks of a stream, of all streams."""
    texts: tuple[str, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    num_tokens: int
    chunks_s: tuple[float, ...]
    """When each chunk of text came, from the request's start."""
    text: str


async def run_load(url: str, model: str, load: Load) -> LoadResult:
    """Send all prompts, `concurrency` at a time, seed i to prompt i."""
    slots = asyncio.Semaphore(load.concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def run(index: int, prompt: str) -> _Answer:
            async with slots:
                return await _stream(client, model, load, prompt, seed=index)

        started = time.perf_counter()
        answers = await asyncio.gather(*[run(i, p) for i, p in enumerate(load.prompts)])
        elapsed_s = time.perf_counter() - started
    return LoadResult(
        num_tokens=sum(answer.num_tokens for answer in answers),
        elapsed_s=elapsed_s,
        time_to_first_s=tuple(answer.chunks_s[0] for answer in answers),
        chunk_gaps_s=tuple(
            after - before for answer in answers for before, after in pairwise(answer.chunks_s)
        ),
        texts=tuple(answer.text for answer in answers),
    )


async def _stream(
    client: httpx.AsyncClient, model: str, load: Load, prompt: str, *, seed: int
) -> _Answer:
    request = {
        "model": model,
        "prompt": prompt,
        "max_tokens": load.max_tokens,
        "temperature": load.temperature,
        "seed": seed,
        "ignore_eos": True,
        "cache_salt": load.cache_salt,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started, chunks_s, text, num_tokens = time.perf_counter(), [], "", 0
    async with client.stream("POST", "/v1/completions", json=request) as response:
        if response.status_code != 200:
            raise RuntimeError((await response.aread()).decode())
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            for choice in event["choices"]:
                chunks_s.append(time.perf_counter() - started)
                text += choice["text"]
            if event["usage"]:
                num_tokens = event["usage"]["completion_tokens"]
    return _Answer(num_tokens=num_tokens, chunks_s=tuple(chunks_s), text=text)
