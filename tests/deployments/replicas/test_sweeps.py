"""Where a text ends and what its usage says: the same, however many tokens a round commits.

Public reports of other servers: a block that holds a stop and crosses max_tokens; a stream whose
reason differs from the whole answer's; usage that counts more than was delivered.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from tests.deployments.loops import Models
from tests.deployments.serving import client_of, complete, local_serving, stream

NUM_TOKENS = 16


@pytest.fixture
async def clients(models: Models) -> AsyncIterator[dict[int, httpx.AsyncClient]]:
    """A client for each draft length of a server."""
    async with AsyncExitStack() as stack:
        clients = {}
        for gamma in (0, 8):
            serving = await stack.enter_async_context(local_serving(models.target, gamma=gamma))
            clients[gamma] = await stack.enter_async_context(client_of(serving))
        yield clients


async def streamed(client: httpx.AsyncClient, **fields: Any) -> list[tuple[str, str]]:
    """Text and finish reason of each choice of a stream, of which each has exactly one reason."""
    texts: dict[int, str] = {}
    reasons: dict[int, list[str]] = {}
    for event in await stream(client, **fields):
        for choice in event["choices"]:
            index, reason = choice["index"], choice["finish_reason"]
            texts[index] = texts.get(index, "") + choice["text"]
            reasons.setdefault(index, []).extend([reason] if reason else [])
    return [(texts[index], *reasons[index]) for index in sorted(texts)]


async def test_a_stop_and_a_limit_end_a_text_where_they_should(
    clients: dict[int, httpx.AsyncClient],
) -> None:
    """Tokens are characters here, so the reference is plain slicing."""
    (choice,) = (await complete(clients[0], temperature=0, max_tokens=NUM_TOKENS))["choices"]
    text = choice["text"]
    assert len(text) == NUM_TOKENS
    stop = text[4:7]
    end = text.index(stop)
    num_to_stop = end + len(stop)
    for max_tokens in range(max(1, num_to_stop - 2), num_to_stop + 10):
        is_stopped = max_tokens >= num_to_stop
        expected = (
            text[:end] if is_stopped else text[:max_tokens],
            "stop" if is_stopped else "length",
        )
        n = 1 + max_tokens % 2
        fields = {"temperature": 0, "max_tokens": max_tokens, "stop": stop, "n": n}
        for gamma, client in clients.items():
            whole = await complete(client, **fields)
            got = [(c["text"], c["finish_reason"]) for c in whole["choices"]]
            assert got == [expected] * n, (gamma, fields)
            num_tokens = n * min(max_tokens, num_to_stop)
            assert whole["usage"]["completion_tokens"] == num_tokens, (gamma, fields)
            assert whole["usage"]["prompt_tokens"] == len("Hello")
            assert await streamed(client, **fields) == got, (gamma, fields)


@pytest.mark.parametrize("num_stops", [1, 2])
async def test_overlapping_stops_cut_alike_whatever_a_round_commits(
    num_stops: int, clients: dict[int, httpx.AsyncClient]
) -> None:
    for seed in range(3):
        fields: dict[str, Any] = {"seed": seed, "max_tokens": NUM_TOKENS}
        (choice,) = (await complete(clients[0], **fields))["choices"]
        text = choice["text"]
        stops = [text[6:10], text[8]][:num_stops]
        # the stop that is complete first counts, and of those the one that begins first
        ends = [text.index(stop) + len(stop) for stop in stops]
        cut = min(
            text.index(stop) for stop, end in zip(stops, ends, strict=True) if end == min(ends)
        )
        for gamma, client in clients.items():
            whole = await complete(client, stop=stops, **fields)
            got = [(c["text"], c["finish_reason"]) for c in whole["choices"]]
            assert got == [(text[:cut], "stop")], (gamma, seed)
            assert await streamed(client, stop=stops, **fields) == got, (gamma, seed)


async def test_usage_of_a_stream_is_that_of_the_whole_answer(
    clients: dict[int, httpx.AsyncClient],
) -> None:
    for client in clients.values():
        fields: dict[str, Any] = {"prompt": ["Hello", "World!"], "n": 2, "max_tokens": 7}
        whole = await complete(client, **fields)
        events = await stream(client, stream_options={"include_usage": True}, **fields)
        usage = events[-1]["usage"]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert usage[name] == whole["usage"][name]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (11, 28)
