"""`tandem bench http-path`: what it costs that each text is a stream of HTTP of its own.

The same prompts are completed in two ways, in turn: as a stream each, and by one request that has
all of them and is answered once they are complete. The router then has all texts in its own process
and writes a single answer, so the difference is what the path of HTTP takes: Serve's proxy, the
checks of each request, the events, and the client that reads them on the same machine.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import httpx
from tqdm import tqdm

from tandem.arguments import whole
from tandem.bench.app import measured_app
from tandem.bench.options import AppOptions, command_of, option
from tandem.bench.report import markdown_table, write_result
from tandem.live.client import (
    TIMEOUT_S,
    Endpoint,
    Load,
    LoadError,
    answer,
    http_client,
    request_body,
)
from tandem.live.texts import make_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(AppOptions):
    """Greedy streams of easy texts."""

    num_streams: int = option(16, "texts at a time", type=whole)
    max_tokens: int = option(128, "tokens of a completion", type=whole)
    repeats: int = option(5, "how often both ways are measured; medians count", type=whole)
    seed: int = option(0, "the seed of the prompts", type=int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The seconds that both ways took for the same texts."""

    streams_s: float
    one_request_s: float

    @property
    def cost(self) -> float:
        """The share of tokens per second that the streams lose."""
        return 1.0 - self.one_request_s / self.streams_s


def run(options: Options) -> str:
    """Measure both ways in turn; returns the table. Raises LoadError if their texts differ."""
    prompts = make_prompts("easy", options.num_streams, seed=options.seed)
    load = Load(prompts=prompts, max_tokens=options.max_tokens, temperature=0.0)
    with measured_app(options, ("dynamic",)) as server:
        server.set_gamma("dynamic")
        measure(server.endpoint, load)  # the controller learns, and connections are made
        pairs = [
            measure(server.endpoint, load) for _ in tqdm(range(options.repeats), desc="http path")
        ]
    table = format_table(options, pairs)
    figures = {"options": options, "pairs": pairs}
    write_result(options.output, command_of("bench http-path", options), table, figures)
    return table


def measure(endpoint: Endpoint, load: Load) -> Pair:
    """Complete a load in both ways; raises LoadError."""
    started = time.perf_counter()
    streamed = asyncio.run(_stream_all(endpoint, load.again()))
    streams_s = time.perf_counter() - started
    started = time.perf_counter()
    whole_texts = _complete_in_one_request(endpoint, load.again())
    one_request_s = time.perf_counter() - started
    if streamed != whole_texts:
        raise LoadError("the streams' texts differ from those of one request")
    return Pair(streams_s=streams_s, one_request_s=one_request_s)


async def _stream_all(endpoint: Endpoint, load: Load) -> list[str]:
    async with http_client(endpoint) as client:
        answers = await asyncio.gather(
            *(answer(client, endpoint, load, index) for index in range(len(load.prompts)))
        )
    return [each.text for each in answers]


def _complete_in_one_request(endpoint: Endpoint, load: Load) -> list[str]:
    body = {**request_body(endpoint, load, 0), "prompt": list(load.prompts), "stream": False}
    del body["stream_options"]
    response = httpx.post(f"{endpoint.url}/v1/completions", json=body, timeout=TIMEOUT_S)
    if response.status_code != 200:
        raise LoadError(f"{endpoint.url} answered with status {response.status_code}")
    return [choice["text"] for choice in response.json()["choices"]]


def format_table(options: Options, pairs: Sequence[Pair]) -> str:
    """One line: medians over the repeats, and the range of the cost."""
    num_tokens = options.num_streams * options.max_tokens
    costs = [pair.cost for pair in pairs]
    columns: dict[str, Callable[[Sequence[Pair]], str]] = {
        "streams": lambda _: str(options.num_streams),
        "tokens/s, a stream each": lambda all_: (
            f"{num_tokens / median(pair.streams_s for pair in all_):.1f}"
        ),
        "tokens/s, one request": lambda all_: (
            f"{num_tokens / median(pair.one_request_s for pair in all_):.1f}"
        ),
        "what the path of HTTP costs": lambda _: (
            f"{median(costs):.1%} ({min(costs):.1%} to {max(costs):.1%})"
        ),
    }
    return markdown_table(columns, [pairs])
