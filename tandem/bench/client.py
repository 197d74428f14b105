"""Loads of streaming completions, and what they measured."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from uuid import uuid4

import httpx

from workers.errors import ConfigError, TandemError

TIMEOUT_S = 600.0
MAX_SHOWN_ERROR = 500
"""Characters of a server's error."""
OVERLOADED = frozenset({429, 503})

Prompt = str | tuple[int, ...]


class LoadError(TandemError):
    """A request of a load failed."""


class BrokenOffError(LoadError):
    """The connection was cut, or there was nobody to connect to."""


class RefusedError(LoadError):
    """The server has too much to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A server of OpenAI's completions."""

    url: str
    model: str
    is_ours: bool
    """Whether it knows our own fields, such as cache_salt."""
    with_ignore_eos: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests to send; request i has the seed i."""

    prompts: Sequence[Prompt]
    max_tokens: int
    temperature: float
    nonce: str = field(default_factory=lambda: uuid4().hex[:12])
    """Each load has another, or its prompts would be in the prefix cache already."""

    def again(self, *, max_tokens: int | None = None) -> "Load":
        """The same requests, of which none is in the prefix cache; or shorter ones."""
        return Load(
            prompts=self.prompts,
            max_tokens=max_tokens or self.max_tokens,
            temperature=self.temperature,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Of a stream."""

    at_s: float
    """By the clock of time.perf_counter."""
    text: str
    num_tokens: int | None
    """Of the completion so far, where the event says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Times by the clock of time.perf_counter."""

    started_s: float
    """When the request was sent, or should have been."""
    ended_s: float
    chunks_s: tuple[float, ...]
    """When each piece of text came."""
    num_tokens: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """Times in seconds."""

    num_tokens: int
    tokens_per_s: float
    """Of all streams together."""
    elapsed_s: float
    """From the load's start to its last event."""
    time_to_first_s: tuple[float, ...]
    """From a request's start to its first text."""
    chunk_gaps_s: tuple[float, ...]
    """Between two chunks of a stream, of all streams."""
    durations_s: tuple[float, ...]
    """From a request's start to its end."""
    texts: tuple[str, ...]
    num_refused: int = 0
    """Requests that the server had no room for; they are in none of the others."""

    @property
    def later_token_s(self) -> float:
        """Per token of a stream after its first, which the prompt takes its time for."""
        num_later = self.num_tokens - len(self.durations_s)
        return (sum(self.durations_s) - sum(self.time_to_first_s)) / max(1, num_later)


async def run_closed(endpoint: Endpoint, load: Load, *, concurrency: int) -> LoadResult:
    """Complete all prompts, `concurrency` at a time; raises LoadError.

    What is measured is a part of a long run. Streams begin with requests of several lengths, so
    that prompts do not come all at once, and go on with further ones until the last prompt is
    complete; neither count. So there are always as many, and they make tokens at a rate of
    concurrency * tokens / the sum of all requests' times.
    """
    num_prompts = len(load.prompts)
    left = iter(range(num_prompts))
    answers: dict[int, Answer] = {}
    async with http_client(endpoint) as client:

        async def ask(load: Load, index: int) -> Answer:
            return await answer(client, endpoint, load, index, started_s=time.perf_counter())

        async def keep_asking(stream: int) -> None:
            of_others = stream % num_prompts
            if concurrency > 1:
                num_tokens = max(1, load.max_tokens * (stream + 1) // concurrency)
                await ask(load.again(max_tokens=num_tokens), of_others)
            for index in left:
                answers[index] = await ask(load, index)
            while len(answers) < num_prompts:
                await ask(load.again(), of_others)

        started_s = time.perf_counter()
        await _until_first_ends([keep_asking(stream) for stream in range(concurrency)])
    in_order = [answers[index] for index in range(num_prompts)]
    stream_s = sum(a.ended_s - a.started_s for a in in_order)
    return _result(in_order, started_s=started_s, seconds=stream_s / concurrency)


async def run_open(endpoint: Endpoint, load: Load, arrivals_s: Sequence[float]) -> LoadResult:
    """Send each prompt at its time, whatever has become of the others; raises LoadError.

    A request's times count from its arrival, so that what delays its sending is not left out.
    """
    async with http_client(endpoint) as client:
        start_s = time.perf_counter()

        async def run(index: int) -> Answer | None:
            arrival_s = start_s + arrivals_s[index]
            await asyncio.sleep(arrival_s - time.perf_counter())
            try:
                return await answer(client, endpoint, load, index, started_s=arrival_s)
            except RefusedError:
                return None

        answers = await _run_all(run, len(load.prompts))
    num_refused = len(load.prompts) - len(answers)
    return _result(answers, started_s=start_s, num_refused=num_refused)


def http_client(endpoint: Endpoint) -> httpx.AsyncClient:
    """Without a limit of its own on what runs at a time: that is the load's to say."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=endpoint.url, timeout=TIMEOUT_S, limits=limits)


async def answer(
    client: httpx.AsyncClient, endpoint: Endpoint, load: Load, index: int, *, started_s: float
) -> Answer:
    """The whole completion of a load's prompt; raises LoadError."""
    chunks_s, text, num_tokens = [], "", None
    async with aclosing(stream(client, endpoint, load, index)) as events:
        async for event in events:
            num_tokens = num_tokens if event.num_tokens is None else event.num_tokens
            if event.text:
                chunks_s.append(event.at_s)
                text += event.text
    if num_tokens is None:
        raise LoadError(
            f"{endpoint.url} sent no usage at the end of a stream, so tokens cannot be counted; it "
            'must know "stream_options": {"include_usage": true}'
        )
    return Answer(
        started_s=started_s,
        ended_s=time.perf_counter(),
        chunks_s=tuple(chunks_s),
        num_tokens=num_tokens,
        text=text,
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
                raise _refusal(endpoint, response.status_code, (await response.aread()).decode())
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if line.startswith("data:") and data != "[DONE]":
                    yield _event(endpoint, data)
    except httpx.HTTPError as error:
        raise BrokenOffError(f"{endpoint.url} broke off a request: {error!r}") from error


def request_body(endpoint: Endpoint, load: Load, index: int) -> dict[str, Any]:
    """What is asked of the server.

    Servers that are not ours are sent OpenAI's own fields only, and ignore_eos unless the endpoint
    says otherwise; a line of its own before a prompt stands in for the salt.
    """
    prompt = load.prompts[index]
    request = {
        "model": endpoint.model,
        "prompt": prompt,
        "max_tokens": load.max_tokens,
        "temperature": load.temperature,
        "seed": index,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if endpoint.with_ignore_eos:
        request["ignore_eos"] = True
    if endpoint.is_ours:
        request["cache_salt"] = load.nonce
    else:
        assert isinstance(prompt, str), "token ids mean something to our own tokenizer only"
        request["prompt"] = f"# {load.nonce}\n{prompt}"
    return request


async def _until_first_ends(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all until one is done, or fails, and hang up on the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        await cancel_all(tasks)


async def _run_all(
    run: Callable[[int], Coroutine[Any, Any, Answer | None]], num_requests: int
) -> list[Answer]:
    """What came of them, refused ones left out; the first that fails ends all."""
    tasks = [asyncio.create_task(run(index)) for index in range(num_requests)]
    try:
        answers = [a for a in await asyncio.gather(*tasks) if a is not None]
    finally:
        await cancel_all(tasks)
    if not answers:
        raise LoadError(f"the server refused all of {num_requests} requests; offer it fewer")
    return answers


def _result(
    answers: Sequence[Answer],
    *,
    started_s: float,
    seconds: float | None = None,
    num_refused: int = 0,
) -> LoadResult:
    """`seconds` are those that the tokens took, if not all from the start to the end."""
    num_tokens = sum(a.num_tokens for a in answers)
    elapsed_s = max(a.ended_s for a in answers) - started_s
    return LoadResult(
        num_tokens=num_tokens,
        tokens_per_s=num_tokens / (elapsed_s if seconds is None else seconds),
        elapsed_s=elapsed_s,
        time_to_first_s=tuple(a.chunks_s[0] - a.started_s for a in answers if a.chunks_s),
        chunk_gaps_s=tuple(
            after - before for a in answers for before, after in pairwise(a.chunks_s)
        ),
        durations_s=tuple(a.ended_s - a.started_s for a in answers),
        texts=tuple(a.text for a in answers),
        num_refused=num_refused,
    )


def _event(endpoint: Endpoint, data: str) -> Event:
    try:
        body = json.loads(data)
        if "error" in body:
            raise LoadError(f"{endpoint.url} ended a completion: {body['error']}")
        usage = body.get("usage")
        return Event(
            at_s=time.perf_counter(),
            text="".join(choice.get("text") or "" for choice in body["choices"]),
            num_tokens=int(usage["completion_tokens"]) if usage else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(
            f"{endpoint.url} sent what is no event of a completion: {data[:MAX_SHOWN_ERROR]}"
        ) from error


def _refusal(endpoint: Endpoint, status: int, body: str) -> TandemError:
    if "ignore_eos" in body and not endpoint.is_ours:
        return ConfigError(
            f"{endpoint.url} refuses ignore_eos ({body[:MAX_SHOWN_ERROR]}); give --no-ignore-eos: "
            "completions then end where the model ends them"
        )
    message = f"{endpoint.url} answered with status {status}: {body[:MAX_SHOWN_ERROR]}"
    return RefusedError(message) if status in OVERLOADED else LoadError(message)
