"""`tandem bench long-prompt`: what a long prompt does to the streams that run.

Its prefill is cut into chunks that share the target's steps with the running streams, so these go
on, more slowly. Each measurement starts the streams, lets them run alone for a while, sends the
long prompt, and hangs up on the streams once that is answered.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import httpx
from tqdm import tqdm
from transformers import AutoTokenizer

from tandem.arguments import above_zero, whole
from tandem.bench.app import measured_app, target_folder
from tandem.bench.options import LoadOptions, command_of, option
from tandem.bench.report import markdown_table, milliseconds, percentiles, write_result
from tandem.bench.rows import Setting, make_settings
from tandem.live.client import Endpoint, Event, Load, LoadError, cancel_all, http_client, stream
from tandem.live.texts import make_long_text, make_prompts
from workers.errors import ConfigError

if TYPE_CHECKING:
    from tandem.live.server import LiveServer

RANKS = (50, 95, 99, 100)
MOST_CHARACTERS_PER_TOKEN = 16
"""The most characters per token of a long text, on average."""
POLL_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(LoadOptions):
    """`max_tokens` is what follows the long prompt; the streams go on as long as they are read."""

    concurrencies: tuple[int, ...] = option((4,), "streams that run", type=whole)
    max_tokens: int = option(8, "tokens that follow the long prompt", type=whole)
    long_tokens: int | None = option(
        None, "tokens of the long prompt (default: all that the context has room for)", type=whole
    )
    alone_s: float = option(5.0, "seconds that the streams run before it comes", type=above_zero)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """One long prompt among streams; times are by the clock of time.perf_counter."""

    began_s: float
    """The time at which all streams had begun."""
    sent_s: float
    """The time at which the long prompt was sent."""
    first_s: float
    """The time at which its first text came."""
    chunks: tuple[tuple[Event, ...], ...]
    """The pieces of text of each stream."""

    @property
    def alone_tokens_per_s(self) -> float:
        """Tokens per second of all streams before the long prompt was sent."""
        return self._num_tokens(self.began_s, self.sent_s) / (self.sent_s - self.began_s)

    @property
    def beside_tokens_per_s(self) -> float:
        """Tokens per second of all streams while the long prompt was run."""
        return self._num_tokens(self.sent_s, self.first_s) / (self.first_s - self.sent_s)

    def gaps_alone(self) -> list[float]:
        """Seconds between two chunks of a stream before the long prompt was sent."""
        return [b - a for a, b in self._pairs() if a >= self.began_s and b <= self.sent_s]

    def gaps_beside(self) -> list[float]:
        """Seconds between two chunks of a stream that the prefill reached into."""
        return [b - a for a, b in self._pairs() if b > self.sent_s and a < self.first_s]

    def _pairs(self) -> list[tuple[float, float]]:
        times = [[chunk.at_s for chunk in chunks] for chunks in self.chunks]
        return [pair for stream_s in times for pair in pairwise(stream_s)]

    def _num_tokens(self, after_s: float, until_s: float) -> int:
        """Tokens that came in that time."""
        return sum(
            late.usage.num_tokens - early.usage.num_tokens
            for chunks in self.chunks
            for early, late in pairwise(chunks)
            if after_s < late.at_s <= until_s
        )


def run(options: Options) -> str:
    """Measure all settings, taking turns; returns the table."""
    settings = make_settings(options)
    measured: dict[Setting, list[Interference]] = {setting: [] for setting in settings}
    with measured_app(options, options.gammas) as server:
        max_model_len = _max_model_len(server.endpoint)
        num_long = long_prompt_len(options, max_model_len)
        tokenizer: Any = AutoTokenizer.from_pretrained(target_folder(options))
        long_text = make_long_text(num_long * MOST_CHARACTERS_PER_TOKEN, seed=options.seed)
        long_prompt = tuple(tokenizer.encode(long_text, verbose=False)[:num_long])
        for setting in tqdm(settings * options.repeats, desc="long prompt"):
            prompts = make_prompts(setting.text, setting.concurrency, seed=options.seed)
            longest = max(len(tokenizer.encode(prompt)) for prompt in prompts)
            streams = Load(
                prompts=prompts,
                max_tokens=max_model_len - longest,
                temperature=setting.temperature,
            )
            long = Load(prompts=[long_prompt], max_tokens=options.max_tokens, temperature=0.0)
            measured[setting].append(_measure(server, setting, streams, long, options.alone_s))
    table = format_table(measured, num_long)
    figures = {"options": options, "rows": [_row(*each) for each in measured.items()]}
    write_result(options.output, command_of("bench long-prompt", options), table, figures)
    return table


def long_prompt_len(options: Options, max_model_len: int) -> int:
    """The long prompt's tokens; raises ConfigError if there is no room for what is asked."""
    longest = max_model_len - options.max_tokens
    if longest < 1 or (options.long_tokens or 0) > longest:
        raise ConfigError(
            f"--long-tokens {options.long_tokens or 1} and --max-tokens {options.max_tokens} are "
            f"more than the context of {max_model_len} tokens; give fewer"
        )
    return options.long_tokens or longest


async def interfere(
    endpoint: Endpoint, streams: Load, long: Load, *, alone_s: float
) -> Interference:
    """Run the streams, and after a while the long prompt beside them; raises LoadError."""
    chunks: list[list[Event]] = [[] for _ in streams.prompts]
    async with http_client(endpoint) as client:

        async def read(index: int) -> None:
            async with aclosing(stream(client, endpoint, streams, index)) as events:
                async for event in events:
                    if event.text:
                        chunks[index].append(event)

        tasks = [asyncio.create_task(read(index)) for index in range(len(chunks))]
        try:
            while not all(chunks):
                _check_running(tasks)
                await asyncio.sleep(POLL_S)
            began_s = time.perf_counter()
            await asyncio.sleep(alone_s)
            sent_s = time.perf_counter()
            first_s = await _first_text(client, endpoint, long)
            _check_running(tasks)
        finally:
            await cancel_all(tasks)
    return Interference(
        began_s=began_s, sent_s=sent_s, first_s=first_s, chunks=tuple(map(tuple, chunks))
    )


def format_table(measured: dict[Setting, list[Interference]], num_long: int) -> str:
    """A line per setting; medians over the repeats, percentiles over all of them together."""
    columns: dict[str, Callable[[tuple[Setting, list[Interference]]], str]] = {
        "text": lambda row: row[0].text,
        "T": lambda row: f"{row[0].temperature:g}",
        "streams": lambda row: str(row[0].concurrency),
        "gamma": lambda row: str(row[0].gamma),
        "long prompt, tokens": lambda _: str(num_long),
        "its first token s": lambda row: f"{_median(row[1], lambda i: i.first_s - i.sent_s):.2f}",
        "streams' tokens/s before": lambda row: (
            f"{_median(row[1], lambda i: i.alone_tokens_per_s):.1f}"
        ),
        "meanwhile": lambda row: f"{_median(row[1], lambda i: i.beside_tokens_per_s):.1f}",
        "gap before ms p50 / p95 / p99 / max": lambda row: milliseconds(
            *percentiles([gap for i in row[1] for gap in i.gaps_alone()], RANKS)
        ),
        "gap meanwhile ms p50 / p95 / p99 / max": lambda row: milliseconds(
            *percentiles([gap for i in row[1] for gap in i.gaps_beside()], RANKS)
        ),
    }
    return markdown_table(columns, list(measured.items()))


def _row(setting: Setting, measured: Sequence[Interference]) -> dict[str, Any]:
    """The figures of each repeat, for JSON; times in seconds."""
    return {
        "setting": setting,
        "time_to_first_s": [i.first_s - i.sent_s for i in measured],
        "alone_tokens_per_s": [i.alone_tokens_per_s for i in measured],
        "beside_tokens_per_s": [i.beside_tokens_per_s for i in measured],
        "gaps_alone_s": [gap for i in measured for gap in i.gaps_alone()],
        "gaps_beside_s": [gap for i in measured for gap in i.gaps_beside()],
    }


def _median(measured: Sequence[Interference], figure: Callable[[Interference], float]) -> float:
    return median(map(figure, measured))


def _max_model_len(endpoint: Endpoint) -> int:
    (model,) = httpx.get(f"{endpoint.url}/v1/models").json()["data"]
    return int(model["max_model_len"])


def _measure(
    server: "LiveServer", setting: Setting, streams: Load, long: Load, alone_s: float
) -> Interference:
    server.set_gamma(setting.gamma)
    # again: under salts of their own, so that no prefix is cached
    interference = asyncio.run(
        interfere(server.endpoint, streams.again(), long.again(), alone_s=alone_s)
    )
    server.wait_until_idle()
    return interference


async def _first_text(client: httpx.AsyncClient, endpoint: Endpoint, load: Load) -> float:
    """The time of the first text; the rest of the completion is awaited too."""
    first_s = None
    async with aclosing(stream(client, endpoint, load, 0)) as events:
        async for event in events:
            if event.text and first_s is None:
                first_s = event.at_s
    if first_s is None:
        raise LoadError("the long prompt was completed without any text; raise --max-tokens")
    return first_s


def _check_running(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Raises LoadError if a stream has ended."""
    for task in tasks:
        if task.done():
            task.result()
            raise LoadError(
                "a stream came to the end of the context before the long prompt was answered; give "
                "a shorter --alone-s, or a model with a longer context"
            )
