"""Loads of streamed completions, sent to an app of ours, and what they measured."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any
from uuid import uuid4

import httpx

from workers.errors import TandemError

TIMEOUT_S = 600.0
MAX_SHOWN_ERROR = 500
"""Characters of a server's error that are shown."""

Prompt = str | tuple[int, ...]


class LoadError(TandemError):
    """A request of a load failed."""


class RefusedError(LoadError):
    """The app has too much to do, or the key has used up its limit (429)."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BrokenOffError(LoadError):
    """The connection was cut, or there was nobody to connect to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the app answers, and the name of its model."""

    url: str
    model: str
    api_key: str = ""
    """Sent with every request, if there is one."""


def new_salt() -> str:
    """A cache_salt that no other load has."""
    return uuid4().hex[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests to send; request i has the seed i."""

    prompts: Sequence[Prompt]
    max_tokens: int
    temperature: float
    predictions: Sequence[str] = ()
    """What the answers are expected to be, one per prompt or none at all."""
    mode: str = "auto"
    """The requests' `speculation.mode`: which drafter may draft for them."""
    salt: str = field(default_factory=new_salt)
    """The requests' cache_salt: another load has another, so no prefix of it is cached."""

    def again(self, *, max_tokens: int | None = None) -> "Load":
        """The same requests under another salt, shorter ones if max_tokens is given."""
        return replace(self, max_tokens=max_tokens or self.max_tokens, salt=new_salt())


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a completion so far."""

    num_tokens: int
    num_accepted: int
    """Draft tokens among them."""
    num_drafted: int
    """Draft tokens that were verified, accepted or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a stream."""

    at_s: float
    """The time at which it came, by the clock of time.perf_counter."""
    text: str
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole completion; times are by the clock of time.perf_counter."""

    started_s: float
    """The time at which the request was sent."""
    ended_s: float
    events: tuple[Event, ...]
    """The events with text."""
    usage: Usage
    """The usage of the last event."""

    @property
    def text(self) -> str:
        """The completion."""
        return "".join(event.text for event in self.events)

    @property
    def chunks_s(self) -> tuple[float, ...]:
        """The times at which the pieces of text came."""
        return tuple(event.at_s for event in self.events)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The answers to a load, and their speed."""

    answers: tuple[Answer, ...]
    tokens_per_s: float
    """Tokens per second of all streams together."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all completions."""
        return sum(answer.usage.num_tokens for answer in self.answers)

    @property
    def time_to_first_s(self) -> tuple[float, ...]:
        """Seconds from each request's start to its first text."""
        return tuple(a.chunks_s[0] - a.started_s for a in self.answers if a.chunks_s)

    @property
    def chunk_gaps_s(self) -> tuple[float, ...]:
        """Seconds between two chunks of a stream, for all streams."""
        return tuple(late - early for a in self.answers for early, late in pairwise(a.chunks_s))

    @property
    def texts(self) -> tuple[str, ...]:
        """The completions, in the order of the prompts."""
        return tuple(answer.text for answer in self.answers)

    @property
    def later_token_s(self) -> float:
        """Seconds per token of a stream after its first token, which waits for the prompt."""
        num_later = self.num_tokens - len(self.answers)
        all_s = sum(answer.ended_s - answer.started_s for answer in self.answers)
        return (all_s - sum(self.time_to_first_s)) / max(1, num_later)


async def run_closed(endpoint: Endpoint, load: Load, *, concurrency: int) -> LoadResult:
    """Complete all prompts, `concurrency` at a time; raises LoadError.

    What is measured is a part of a long run. Streams begin with requests of several lengths, so
    that prompts do not come all at once, and go on with further ones until the last prompt is
    complete; neither count. So there are always as many streams, and tokens per second are
    concurrency * tokens / the sum of all requests' seconds.
    """
    num_prompts = len(load.prompts)
    left = iter(range(num_prompts))
    answers: dict[int, Answer] = {}
    async with http_client(endpoint) as client:

        async def ask(load: Load, index: int) -> Answer:
            return await answer(client, endpoint, load, index)

        async def keep_asking(stream: int) -> None:
            uncounted = stream % num_prompts
            if concurrency > 1:
                num_tokens = max(1, load.max_tokens * (stream + 1) // concurrency)
                await ask(load.again(max_tokens=num_tokens), uncounted)
            for index in left:
                answers[index] = await ask(load, index)
            while len(answers) < num_prompts:
                await ask(load.again(), uncounted)

        await _until_first_ends([keep_asking(stream) for stream in range(concurrency)])
    in_order = tuple(answers[index] for index in range(num_prompts))
    stream_s = sum(a.ended_s - a.started_s for a in in_order)
    num_tokens = sum(a.usage.num_tokens for a in in_order)
    return LoadResult(answers=in_order, tokens_per_s=concurrency * num_tokens / stream_s)


def http_client(endpoint: Endpoint) -> httpx.AsyncClient:
    """A client without a limit of its own on connections: how many there are is the load's."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    return httpx.AsyncClient(
        base_url=endpoint.url, headers=headers, timeout=TIMEOUT_S, limits=limits
    )


async def answer(client: httpx.AsyncClient, endpoint: Endpoint, load: Load, index: int) -> Answer:
    """The whole completion of a load's prompt; raises LoadError."""
    started_s = time.perf_counter()
    events: list[Event] = []
    usage = Usage(num_tokens=0, num_accepted=0, num_drafted=0)
    async with aclosing(stream(client, endpoint, load, index)) as stream_events:
        async for event in stream_events:
            usage = event.usage
            if event.text:
                events.append(event)
    return Answer(
        started_s=started_s, ended_s=time.perf_counter(), events=tuple(events), usage=usage
    )


async def cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Hang up, and wait until that is done."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def stream(
    client: httpx.AsyncClient, endpoint: Endpoint, load: Load, index: int
) -> AsyncGenerator[Event]:
    """The events of a completion; raises LoadError."""
    request = request_body(endpoint, load, index)
    try:
        async with client.stream("POST", "/v1/completions", json=request) as response:
            if response.status_code != 200:
                body = (await response.aread()).decode()[:MAX_SHOWN_ERROR]
                status = response.status_code
                message = f"{endpoint.url} answered with status {status}: {body}"
                if status == 429:
                    retry_after_s = float(response.headers.get("retry-after", 1))
                    raise RefusedError(message, retry_after_s=retry_after_s)
                raise LoadError(message)
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if line.startswith("data:") and data != "[DONE]":
                    yield _event(endpoint, data)
    except httpx.HTTPError as error:
        raise BrokenOffError(f"{endpoint.url} broke off a request: {error!r}") from error


def request_body(endpoint: Endpoint, load: Load, index: int) -> dict[str, Any]:
    """The JSON of a load's request, which asks for its tokens whatever the model says."""
    body: dict[str, Any] = {
        "model": endpoint.model,
        "prompt": load.prompts[index],
        "max_tokens": load.max_tokens,
        "temperature": load.temperature,
        "seed": index,
        "ignore_eos": True,
        "cache_salt": load.salt,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if load.predictions:
        body["prediction"] = {"type": "content", "content": load.predictions[index]}
    if load.mode != "auto":
        body["speculation"] = {"mode": load.mode}
    return body


async def _until_first_ends(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all until one is done, or fails, and hang up on the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        await cancel_all(tasks)


def _event(endpoint: Endpoint, data: str) -> Event:
    try:
        body = json.loads(data)
        if "error" in body:
            raise LoadError(f"{endpoint.url} ended a completion: {body['error']}")
        speculation = body["usage"]["speculation"]
        return Event(
            at_s=time.perf_counter(),
            text="".join(choice["text"] for choice in body["choices"]),
            usage=Usage(
                num_tokens=int(body["usage"]["completion_tokens"]),
                num_accepted=int(speculation["accepted_tokens"]),
                num_drafted=int(speculation["drafted_tokens"]),
            ),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise LoadError(
            f"{endpoint.url} sent what is no event of a completion: {data[:MAX_SHOWN_ERROR]}"
        ) from error
