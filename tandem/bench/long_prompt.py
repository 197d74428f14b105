"""`tandem bench long-prompt`: what a long prompt does to the streams that run.

Its prefill is cut into chunks that share the target's steps with the running streams, so these go
on, more slowly. Each measurement starts the streams, lets them run alone for a while, sends the
long prompt, and hangs up on the streams once that is answered.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import httpx
from tqdm import tqdm
from transformers import AutoTokenizer

from cluster import bundled
from tandem.bench.client import Endpoint, Event, Load, LoadError, cancel_all, http_client, stream
from tandem.bench.remote import served_models
from tandem.bench.report import markdown_table, milliseconds, percentiles, write_report
from tandem.bench.rows import Setting, make_settings
from tandem.bench.served import ServedOptions, app_options, header, measure, target_name
from tandem.bench.server import LiveServer, live_server
from tandem.bench.texts import make_long_text, make_prompts
from workers.errors import ConfigError

RANKS = (50, 95, 99, 100)
MOST_CHARACTERS_PER_TOKEN = 16
"""On average over a long text."""
WARM_UP_TOKENS = 16
POLL_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPromptOptions(ServedOptions):
    """`max_tokens` is what follows the long prompt; the streams go on as long as they are read."""

    texts: tuple[str, ...]
    """Of `texts.KINDS`."""
    temperatures: tuple[float, ...]
    concurrencies: tuple[int, ...]
    """Streams that run."""
    long_tokens: int | None
    """Of the long prompt; None takes as many as the context has room for."""
    alone_s: float
    """How long the streams run before it comes."""
    repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """One long prompt among streams; times by the clock of time.perf_counter."""

    began_s: float
    """When all streams had begun."""
    sent_s: float
    """When the long prompt was sent."""
    first_s: float
    """When its first text came."""
    chunks: tuple[tuple[Event, ...], ...]
    """The pieces of text of each stream."""

    def texts_alone(self) -> list[str]:
        """What each stream wrote before the long prompt was sent."""
        return self._texts(self.began_s, self.sent_s)

    def texts_beside(self) -> list[str]:
        """What each wrote until the long prompt was answered."""
        return self._texts(self.sent_s, self.first_s)

    def gaps_alone(self) -> list[float]:
        """Between two chunks of a stream, before the long prompt was sent."""
        return [b - a for a, b in self._pairs() if a >= self.began_s and b <= self.sent_s]

    def gaps_beside(self) -> list[float]:
        """Those that its prefill reached into."""
        return [b - a for a, b in self._pairs() if b > self.sent_s and a < self.first_s]

    def _pairs(self) -> list[tuple[float, float]]:
        times = [[chunk.at_s for chunk in of_stream] for of_stream in self.chunks]
        return [pair for of_stream in times for pair in pairwise(of_stream)]

    def _texts(self, after_s: float, until_s: float) -> list[str]:
        return [
            "".join(chunk.text for chunk in of_stream if after_s < chunk.at_s <= until_s)
            for of_stream in self.chunks
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPromptRow:
    """Over all repeats; times in seconds."""

    setting: Setting
    num_long_tokens: int
    num_gaps_alone: int
    num_gaps_beside: int
    gap_alone_s: tuple[float, ...]
    """p50, p95, p99 and the longest between two chunks of a stream, before the long prompt."""
    gap_beside_s: tuple[float, ...]
    """Likewise, while it is prefilled."""
    tokens_per_s_alone: tuple[float, ...]
    """Of all streams together, in each repeat, before the long prompt."""
    tokens_per_s_beside: tuple[float, ...]
    """Likewise, while it is prefilled."""
    time_to_first_s: float
    """Of the long prompt, the median."""


def run_long_prompt(options: LongPromptOptions) -> list[LongPromptRow]:
    """Measure all settings interleaved; write JSON and a table below `options.output`."""
    options.output.mkdir(parents=True, exist_ok=True)
    settings = make_settings(
        texts=options.texts,
        temperatures=options.temperatures,
        concurrencies=options.concurrencies,
        gammas=options.gammas,
    )
    measured: dict[Setting, list[Interference]] = {setting: [] for setting in settings}
    with live_server(app_options(options), options.output / "server.log") as server:
        loads = _Loads(options, max_model_len=_max_model_len(server.endpoint))
        for setting in measured:  # the first of everything is slower
            measure(server, setting, loads.prompts(setting), WARM_UP_TOKENS)
        progress = tqdm(total=len(measured) * options.repeats, desc="long-prompt")
        for _ in range(options.repeats):
            for setting, of_setting in measured.items():
                of_setting.append(_measure(server, setting, loads, options.alone_s))
                progress.update()
        progress.close()
        rows = [
            make_row(s, of_s, len(loads.long_prompt), count_tokens=loads.count_tokens)
            for s, of_s in measured.items()
        ]
        report = {**header(options, server), "rows": [asdict(row) for row in rows]}
    write_report(options.output, "long-prompt", report, format_table(rows))
    return rows


class _Loads:
    """What is sent; anew each time, so that no prefix is cached."""

    def __init__(self, options: LongPromptOptions, *, max_model_len: int) -> None:
        self._options = options
        self._max_model_len = max_model_len
        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            bundled.resolve(str(target_name(options)))
        )
        self._prompts = {
            text: make_prompts(text, max(options.concurrencies), seed=options.seed)
            for text in options.texts
        }
        num_tokens = long_prompt_len(options, max_model_len)
        text = make_long_text(num_tokens * MOST_CHARACTERS_PER_TOKEN, seed=options.seed)
        self.long_prompt = tuple(self._tokenizer.encode(text, verbose=False)[:num_tokens])

    def count_tokens(self, text: str) -> int:
        """About: what is cut out of a text may be cut in the middle of a token."""
        return len(self._tokenizer.encode(text, verbose=False))

    def prompts(self, setting: Setting) -> list[str]:
        return self._prompts[setting.text][: setting.concurrency]

    def streams(self, setting: Setting) -> Load:
        """To the end of the context."""
        prompts = self.prompts(setting)
        longest = max(len(self._tokenizer.encode(prompt)) for prompt in prompts)
        return Load(
            prompts=prompts,
            max_tokens=self._max_model_len - longest,
            temperature=setting.temperature,
        )

    def long(self) -> Load:
        return Load(
            prompts=[self.long_prompt], max_tokens=self._options.max_tokens, temperature=0.0
        )


def long_prompt_len(options: LongPromptOptions, max_model_len: int) -> int:
    """In tokens; raises ConfigError if there is no room for what is asked."""
    longest = max_model_len - options.max_tokens
    if longest < 1 or (options.long_tokens or 0) > longest:
        raise ConfigError(
            f"--long-tokens {options.long_tokens or 1} and --max-tokens {options.max_tokens} are "
            f"more than the context of {max_model_len} tokens; give fewer"
        )
    return options.long_tokens or longest


def _max_model_len(endpoint: Endpoint) -> int:
    (model,) = served_models(endpoint.url)
    return int(model["max_model_len"])


def _measure(server: LiveServer, setting: Setting, loads: _Loads, alone_s: float) -> Interference:
    server.set_gamma(setting.gamma)
    interference = asyncio.run(
        interfere(server.endpoint, loads.streams(setting), loads.long(), alone_s=alone_s)
    )
    server.wait_until_idle()
    return interference


async def interfere(
    endpoint: Endpoint, streams: Load, long: Load, *, alone_s: float
) -> Interference:
    """Run the streams, and after a while the long prompt beside them; raises LoadError."""
    chunks: list[list[Event]] = [[] for _ in streams.prompts]
    async with http_client(endpoint) as client:

        async def run(index: int) -> None:
            async with aclosing(stream(client, endpoint, streams, index)) as events:
                async for event in events:
                    if event.text:
                        chunks[index].append(event)

        tasks = [asyncio.create_task(run(index)) for index in range(len(chunks))]
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
        began_s=began_s,
        sent_s=sent_s,
        first_s=first_s,
        chunks=tuple(tuple(of_stream) for of_stream in chunks),
    )


async def _first_text(client: httpx.AsyncClient, endpoint: Endpoint, load: Load) -> float:
    """When it came; the rest of the completion is awaited too."""
    first_s = None
    async with aclosing(stream(client, endpoint, load, 0)) as events:
        async for event in events:
            if event.text and first_s is None:
                first_s = event.at_s
    if first_s is None:
        raise LoadError("the long prompt was completed without any text; raise --max-tokens")
    return first_s


def _check_running(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()
            raise LoadError(
                "a stream came to the end of the context before the long prompt was answered; give "
                "a shorter --alone-s, or a model with a longer context"
            )


def make_row(
    setting: Setting,
    measured: Sequence[Interference],
    num_long_tokens: int,
    *,
    count_tokens: Callable[[str], int],
) -> LongPromptRow:
    alone = [gap for interference in measured for gap in interference.gaps_alone()]
    beside = [gap for interference in measured for gap in interference.gaps_beside()]
    return LongPromptRow(
        setting=setting,
        num_long_tokens=num_long_tokens,
        num_gaps_alone=len(alone),
        num_gaps_beside=len(beside),
        gap_alone_s=percentiles(alone, RANKS),
        gap_beside_s=percentiles(beside, RANKS),
        tokens_per_s_alone=tuple(
            sum(map(count_tokens, i.texts_alone())) / (i.sent_s - i.began_s) for i in measured
        ),
        tokens_per_s_beside=tuple(
            sum(map(count_tokens, i.texts_beside())) / (i.first_s - i.sent_s) for i in measured
        ),
        time_to_first_s=median(i.first_s - i.sent_s for i in measured),
    )


def format_table(rows: Sequence[LongPromptRow]) -> str:
    """The rows as a Markdown table."""
    columns: dict[str, Callable[[LongPromptRow], str]] = {
        "text": lambda row: row.setting.text,
        "T": lambda row: f"{row.setting.temperature:g}",
        "streams": lambda row: str(row.setting.concurrency),
        "gamma": lambda row: str(row.setting.gamma),
        "long prompt, tokens": lambda row: str(row.num_long_tokens),
        "its first token s": lambda row: f"{row.time_to_first_s:.2f}",
        "streams' tokens/s before": lambda row: f"{median(row.tokens_per_s_alone):.1f}",
        "meanwhile": lambda row: f"{median(row.tokens_per_s_beside):.1f}",
        "gap before ms p50 / p95 / p99 / max": lambda row: milliseconds(*row.gap_alone_s),
        "gap meanwhile ms p50 / p95 / p99 / max": lambda row: milliseconds(*row.gap_beside_s),
        "gaps": lambda row: f"{row.num_gaps_alone} / {row.num_gaps_beside}",
    }
    return markdown_table(columns, rows)
