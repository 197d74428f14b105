"""`tandem bench open`: requests that arrive at a rate of their own.

An open loop: users do not wait for each other, so beyond what the server can complete its queue
grows, and with it the time to the first token. Gammas take turns at every rate. A gamma that is
saturated at a rate is not measured at higher ones.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import mean

import numpy as np
from tqdm import tqdm

from tandem.bench.client import Load, LoadResult, run_open
from tandem.bench.plots import plot_open
from tandem.bench.report import (
    markdown_table,
    milliseconds,
    number,
    percentiles,
    write_report,
)
from tandem.bench.rows import Gamma, Setting
from tandem.bench.served import ServedOptions, Server, header, measure, measured_server
from tandem.bench.texts import make_prompts

logger = logging.getLogger(__name__)

SATURATED_RATIO = 1.2
"""See is_saturated."""
RANKS = (50, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions(ServedOptions):
    texts: tuple[str, ...]
    """Of `texts.KINDS`."""
    temperatures: tuple[float, ...]
    num_prompts: int
    """Requests for each rate."""
    rates: tuple[float, ...]
    """Requests per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSetting:
    text: str
    temperature: float
    gamma: Gamma
    rate: float
    """Requests per second that are offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRow:
    """Times in seconds."""

    setting: OpenSetting
    num_requests: int
    num_refused: int
    """Of these, by a server whose queue was full."""
    arriving_s: float
    """How long requests arrived."""
    elapsed_s: float
    """Until the last was complete."""
    tokens_per_s: float
    """Completed, over all of elapsed_s."""
    time_to_first_s: tuple[float, ...]
    """p50, p95, p99 from arrival to the first text."""
    chunk_gap_s: tuple[float, ...]
    """p50, p95, p99 of the time between two chunks of a stream."""
    request_s: tuple[float, ...]
    """p50, p95, p99 from arrival to the end."""
    mean_gamma: float | None
    """Over all rounds, those without drafts too; None of a server that is not ours."""
    is_saturated: bool


def run_open_loop(options: OpenOptions) -> list[OpenRow]:
    """Measure the rates in ascending order; write JSON, a table and a plot."""
    prompts = {
        text: make_prompts(text, options.num_prompts, seed=options.seed) for text in options.texts
    }
    rows: list[OpenRow] = []
    with measured_server(options) as server:
        for warm_up in _warm_ups(options):
            measure(server, warm_up, prompts[warm_up.text][:2], options.max_tokens)
        for setting in tqdm(list(_settings(options)), desc="open"):
            if (saturated_rate := _saturated_rate(setting, rows)) is None:
                rows.append(_measure(server, setting, prompts[setting.text], options))
            else:
                logger.info(
                    "%s, gamma %s: saturated at %g requests/s, so not measured at %g",
                    setting.text,
                    setting.gamma,
                    saturated_rate,
                    setting.rate,
                )
        report = {**header(options, server), "rows": [asdict(row) for row in rows]}
    write_report(options.output, "open", report, format_table(rows))
    plot_open(rows, options.output / "open.png")
    return rows


def poisson_arrivals(rate: float, num_requests: int, *, seed: int) -> list[float]:
    """When requests arrive, in seconds from the start.

    A Poisson process of which it is known that it had `num_requests` in num_requests / rate
    seconds: these are then spread uniformly, and what is offered is the rate exactly. A seed gives
    the same pattern at every rate, faster or slower.
    """
    places = np.random.default_rng(seed).random(num_requests)
    return [float(arrival) for arrival in np.sort(places) * num_requests / rate]


def is_saturated(
    *, arriving_s: float, elapsed_s: float, durations_s: Sequence[float], num_refused: int
) -> bool:
    """Whether requests arrived faster than they were completed.

    They did if completing them took a fifth longer than their arriving, or if some were refused.
    The fastest request's time is left out, since even a server without limits needs that after
    the last arrival.
    """
    if num_refused or not durations_s:
        return True
    return elapsed_s - min(durations_s) > SATURATED_RATIO * arriving_s


def _measure(
    server: Server, setting: OpenSetting, prompts: Sequence[str], options: OpenOptions
) -> OpenRow:
    server.set_gamma(setting.gamma)
    server.take_statistics()
    load = Load(prompts=prompts, max_tokens=options.max_tokens, temperature=setting.temperature)
    arrivals_s = poisson_arrivals(setting.rate, len(prompts), seed=options.seed)
    result = asyncio.run(run_open(server.endpoint, load, arrivals_s))
    statistics = server.take_statistics()
    mean_gamma = mean(statistics.gammas) if statistics is not None and statistics.gammas else None
    return make_row(setting, result, num_requests=len(prompts), mean_gamma=mean_gamma)


def make_row(
    setting: OpenSetting, result: LoadResult, *, num_requests: int, mean_gamma: float | None
) -> OpenRow:
    arriving_s = num_requests / setting.rate
    return OpenRow(
        setting=setting,
        num_requests=num_requests,
        num_refused=result.num_refused,
        arriving_s=arriving_s,
        elapsed_s=result.elapsed_s,
        tokens_per_s=result.tokens_per_s,
        time_to_first_s=percentiles(result.time_to_first_s, RANKS),
        chunk_gap_s=percentiles(result.chunk_gaps_s, RANKS),
        request_s=percentiles(result.durations_s, RANKS),
        mean_gamma=mean_gamma,
        is_saturated=is_saturated(
            arriving_s=arriving_s,
            elapsed_s=result.elapsed_s,
            durations_s=result.durations_s,
            num_refused=result.num_refused,
        ),
    )


def _settings(options: OpenOptions) -> Iterator[OpenSetting]:
    for rate in sorted(options.rates):
        for text in options.texts:
            for temperature in options.temperatures:
                for gamma in options.gammas:
                    yield OpenSetting(text=text, temperature=temperature, gamma=gamma, rate=rate)


def _warm_ups(options: OpenOptions) -> list[Setting]:
    """The first of everything is slower."""
    return [
        Setting(text=text, temperature=options.temperatures[0], concurrency=2, gamma=gamma)
        for text in options.texts
        for gamma in options.gammas
    ]


def _saturated_rate(setting: OpenSetting, rows: Sequence[OpenRow]) -> float | None:
    """The rate at which the same was saturated already, if it was."""
    kind = (setting.text, setting.temperature, setting.gamma)
    for row in rows:
        measured = row.setting
        if row.is_saturated and kind == (measured.text, measured.temperature, measured.gamma):
            return measured.rate
    return None


def format_table(rows: Sequence[OpenRow]) -> str:
    """The rows as a Markdown table."""
    columns: dict[str, Callable[[OpenRow], str]] = {
        "text": lambda row: row.setting.text,
        "T": lambda row: f"{row.setting.temperature:g}",
        "gamma": lambda row: str(row.setting.gamma),
        "mean draft length": lambda row: number(row.mean_gamma, ".1f"),
        "requests/s offered": lambda row: f"{row.setting.rate:g}",
        "tokens/s completed": lambda row: f"{row.tokens_per_s:.1f}",
        "first token ms p50 / p95 / p99": lambda row: milliseconds(*row.time_to_first_s),
        "chunk gap ms p50 / p95 / p99": lambda row: milliseconds(*row.chunk_gap_s),
        "whole request s p50 / p95 / p99": lambda row: " / ".join(
            f"{s:.1f}" for s in row.request_s
        ),
        "arriving / complete after s": lambda row: f"{row.arriving_s:.1f} / {row.elapsed_s:.1f}",
        "refused": lambda row: str(row.num_refused),
        "saturated": lambda row: "yes" if row.is_saturated else "no",
    }
    return markdown_table(columns, rows)
