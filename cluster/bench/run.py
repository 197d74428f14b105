"""`python -m cluster bench`: tokens per second by gamma and concurrency, on one live server."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

from tqdm import tqdm

from cluster.bench.baselines import BATCH, ONE_STREAM, Baselines
from cluster.bench.client import Load, run_load
from cluster.bench.plots import plot_speedups, plot_traffic
from cluster.bench.report import environment, markdown_table, write_report
from cluster.bench.rows import COLUMNS, Gamma, Row, Sample, Setting, make_rows
from cluster.bench.server import LiveServer, live_server
from cluster.bench.texts import make_prompts
from cluster.bench.traffic import TEXTS, Phase
from cluster.bench.traffic import format_table as format_traffic
from cluster.demo import bundled
from cluster.demo.grow import grown_target

MODEL_NAME = "bench"
DYNAMIC_MAX = 8
"""What a dynamic gamma may go up to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    target: str | None
    """None grows the bundled target to 287M parameters."""
    draft: str
    gammas: tuple[Gamma, ...]
    concurrencies: tuple[int, ...]
    texts: tuple[str, ...]
    """Of `texts.KINDS`."""
    temperatures: tuple[float, ...]
    num_prompts: int
    max_tokens: int
    repeats: int
    with_baselines: bool
    """Whether transformers is measured too."""
    with_compile: bool
    output: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineRow:
    """What transformers does in the same run, greedily; the median over the repeats."""

    text: str
    name: str
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    rows: tuple[Row, ...]
    baselines: tuple[BaselineRow, ...]
    """Empty where they were not asked for."""


def run_bench(options: BenchOptions) -> BenchResult:
    """Measure all settings interleaved; write JSON and Markdown tables below `options.output`."""
    options.output.mkdir(parents=True, exist_ok=True)
    target = options.target or grown_target(options.output)
    prompts = {text: make_prompts(text, options.num_prompts) for text in options.texts}
    samples: dict[Setting, list[Sample]] = {setting: [] for setting in _settings(options)}
    speeds: dict[tuple[str, str], list[float]] = {}
    baselines = None
    if options.with_baselines:
        baselines = Baselines(bundled.resolve(target), bundled.resolve(options.draft))
        speeds = {(text, name): [] for text in options.texts for name in (*ONE_STREAM, BATCH)}
    with live_server(_server_options(options, target), options.output / "server.log") as server:
        for setting in samples:  # the first of everything is slower
            _measure(server, setting, prompts[setting.text][:2], options.max_tokens)
        progress = tqdm(total=(len(samples) + len(speeds)) * options.repeats, desc="bench")
        for _ in range(options.repeats):
            for setting, of_setting in samples.items():
                of_prompts = prompts[setting.text]
                of_setting.append(_measure(server, setting, of_prompts, options.max_tokens))
                progress.update()
            for (text, name), of_name in speeds.items():
                assert baselines is not None
                of_name.append(baselines.tokens_per_s(name, prompts[text], options.max_tokens))
                progress.update()
        progress.close()
    result = BenchResult(
        rows=tuple(make_rows(samples)),
        baselines=tuple(
            BaselineRow(text=text, name=name, tokens_per_s=median(of_name))
            for (text, name), of_name in speeds.items()
        ),
    )
    _write(options, target, result)
    return result


def run_traffic(options: BenchOptions) -> list[Phase]:
    """One stream of texts that change, under gamma=dynamic; write JSON, a table and a plot."""
    options.output.mkdir(parents=True, exist_ok=True)
    target = options.target or grown_target(options.output)
    phases = []
    with live_server(_server_options(options, target), options.output / "server.log") as server:
        prompts = {text: make_prompts(text, options.num_prompts) for text in TEXTS}
        setting = Setting(text=TEXTS[0], temperature=0.0, concurrency=1, gamma=0)
        _measure(server, setting, prompts[TEXTS[0]][:2], options.max_tokens)
        server.set_gamma("dynamic")
        for text in tqdm(TEXTS, desc="traffic"):
            load = _load(setting, prompts[text], options.max_tokens)
            result = asyncio.run(run_load(server.url, MODEL_NAME, load))
            statistics = server.take_statistics()
            phases.append(
                Phase(
                    text=text,
                    tokens_per_s=result.tokens_per_s,
                    alpha=statistics.num_accepted / max(statistics.num_tested, 1),
                    gammas=statistics.gammas,
                )
            )
    report = {**_header(options, target), "phases": [asdict(phase) for phase in phases]}
    write_report(options.output, "traffic", report, format_traffic(phases))
    plot_traffic(phases, options.output / "traffic.png")
    return phases


def _server_options(options: BenchOptions, target: str) -> dict[str, str]:
    return {
        "target": target,
        "draft": options.draft,
        "served_model_name": MODEL_NAME,
        "num_speculative_tokens": str(_most_drafts(options.gammas)),
        "gamma": "0",
        "compile": "auto" if options.with_compile else "off",
    }


def _settings(options: BenchOptions) -> list[Setting]:
    return [
        Setting(text=text, temperature=temperature, concurrency=concurrency, gamma=gamma)
        for text in options.texts
        for temperature in options.temperatures
        for concurrency in options.concurrencies
        for gamma in options.gammas
    ]


def _most_drafts(gammas: Sequence[Gamma]) -> int:
    return max(DYNAMIC_MAX if gamma == "dynamic" else gamma for gamma in (*gammas, 1))


def _measure(
    server: LiveServer, setting: Setting, prompts: Sequence[str], max_tokens: int
) -> Sample:
    server.set_gamma(setting.gamma)
    server.take_statistics()
    load = _load(setting, prompts, max_tokens)
    result = asyncio.run(run_load(server.url, MODEL_NAME, load))
    return Sample(load=result, statistics=server.take_statistics())


def _load(setting: Setting, prompts: Sequence[str], max_tokens: int) -> Load:
    return Load(
        prompts=prompts,
        max_tokens=max_tokens,
        temperature=setting.temperature,
        concurrency=setting.concurrency,
        cache_salt=uuid4().hex,
    )


def _header(options: BenchOptions, target: str) -> dict[str, Any]:
    return {
        **environment(),
        "options": {**asdict(options), "output": str(options.output), "target": target},
    }


def _write(options: BenchOptions, target: str, result: BenchResult) -> None:
    report = {
        **_header(options, target),
        "rows": [asdict(row) for row in result.rows],
        "transformers": [asdict(row) for row in result.baselines],
    }
    write_report(options.output, "bench", report, format_tables(result))
    if any(row.speedup for row in result.rows):
        plot_speedups(result.rows, options.output / "speedup.png")


def format_tables(result: BenchResult) -> str:
    """The figures as Markdown tables, times in milliseconds."""
    tables = markdown_table(COLUMNS, result.rows)
    if result.baselines:
        columns: dict[str, Callable[[BaselineRow], str]] = {
            "text": lambda row: row.text,
            "transformers": lambda row: row.name,
            "tokens/s": lambda row: f"{row.tokens_per_s:.1f}",
        }
        tables += "\n" + markdown_table(columns, result.baselines)
    return tables
