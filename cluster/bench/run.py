"""`python -m cluster bench`: tokens per second by gamma and concurrency, on one live server."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal
from uuid import uuid4

from tqdm import tqdm

from cluster.bench.baselines import BATCH, ONE_STREAM, Baselines
from cluster.bench.client import Load, LoadResult, run_load
from cluster.bench.report import environment, markdown_table, write_report
from cluster.bench.server import LiveServer, live_server
from cluster.demo import bundled
from cluster.demo.corpus import Corpus, held_out_prompts
from cluster.demo.grow import grown_target

Gamma = int | Literal["dynamic"]

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
    num_prompts: int
    max_tokens: int
    temperature: float
    repeats: int
    with_baselines: bool
    """Whether transformers is measured too."""
    with_compile: bool
    output: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians over the repeats of one setting; times in seconds."""

    concurrency: int
    gamma: Gamma
    tokens_per_s: float
    speedup: float
    """Over gamma 0 in the same run, where that is measured; else 0."""
    alpha: float
    """Accepted of tested draft tokens."""
    tau: float
    """Tokens per verified sequence and round."""
    time_to_first_s: float
    draft_s: float
    verify_s: float
    verify_compute_s: float
    """Of verify_s, what the target spent in steps."""
    router_s: float
    """The router's own time per round."""
    outside_s: float
    """A round's time in neither a draft nor a target step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineRow:
    """What transformers does in the same run; the median over the repeats."""

    name: str
    num_streams: int
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
    prompts = held_out_prompts(Corpus.load(), options.num_prompts)
    server_options = {
        "target": target,
        "draft": options.draft,
        "served_model_name": MODEL_NAME,
        "num_speculative_tokens": str(_most_drafts(options.gammas)),
        "gamma": "0",
        "compile": "auto" if options.with_compile else "off",
    }
    settings = [(c, g) for c in options.concurrencies for g in options.gammas]
    samples: dict[tuple[int, Gamma], list[_Sample]] = {setting: [] for setting in settings}
    speeds: dict[str, list[float]] = {}
    baselines = None
    if options.with_baselines:
        baselines = Baselines(bundled.resolve(target), bundled.resolve(options.draft))
        speeds = {name: [] for name in (*ONE_STREAM, BATCH)}
    with live_server(server_options, options.output / "server.log") as server:
        for setting in settings:  # the first of everything is slower
            _measure(server, options, prompts[:2], *setting)
        progress = tqdm(total=(len(settings) + len(speeds)) * options.repeats, desc="bench")
        for _ in range(options.repeats):
            for setting in settings:
                samples[setting].append(_measure(server, options, prompts, *setting))
                progress.update()
            for name, of_name in speeds.items():
                assert baselines is not None
                of_name.append(baselines.tokens_per_s(name, prompts, options.max_tokens))
                progress.update()
        progress.close()
    result = BenchResult(
        rows=tuple(_rows(samples)),
        baselines=tuple(
            BaselineRow(
                name=name,
                num_streams=len(prompts) if name == BATCH else 1,
                tokens_per_s=median(of_name),
            )
            for name, of_name in speeds.items()
        ),
    )
    _write(options, target, result)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    load: LoadResult
    statistics: Any


def _most_drafts(gammas: Sequence[Gamma]) -> int:
    return max(DYNAMIC_MAX if gamma == "dynamic" else gamma for gamma in (*gammas, 1))


def _measure(
    server: LiveServer,
    options: BenchOptions,
    prompts: Sequence[str],
    concurrency: int,
    gamma: Gamma,
) -> _Sample:
    server.set_gamma(gamma)
    server.take_statistics()
    load = Load(
        prompts=prompts,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        concurrency=concurrency,
        cache_salt=uuid4().hex,
    )
    result = asyncio.run(run_load(server.url, MODEL_NAME, load))
    return _Sample(load=result, statistics=server.take_statistics())


def _rows(samples: dict[tuple[int, Gamma], list[_Sample]]) -> list[Row]:
    speeds = {
        setting: median(sample.load.tokens_per_s for sample in of_setting)
        for setting, of_setting in samples.items()
    }
    rows = []
    for (concurrency, gamma), of_setting in samples.items():
        statistics = [sample.statistics for sample in of_setting]
        num_tested = sum(s.num_tested for s in statistics)
        num_accepted = sum(s.num_accepted for s in statistics)
        num_drafts = sum(s.num_drafts for s in statistics)
        plain = speeds.get((concurrency, 0))
        first_s = [s for sample in of_setting for s in sample.load.time_to_first_s]
        rows.append(
            Row(
                concurrency=concurrency,
                gamma=gamma,
                tokens_per_s=speeds[concurrency, gamma],
                speedup=speeds[concurrency, gamma] / plain if plain else 0.0,
                alpha=num_accepted / num_tested if num_tested else 0.0,
                tau=1 + num_accepted / num_drafts if num_drafts else 1.0,
                time_to_first_s=median(first_s),
                draft_s=median(s.draft_s for s in statistics),
                verify_s=median(s.verify_s for s in statistics),
                verify_compute_s=median(s.verify_compute_s for s in statistics),
                router_s=median(s.router_s for s in statistics),
                outside_s=median(s.outside_s for s in statistics),
            )
        )
    return rows


def _write(options: BenchOptions, target: str, result: BenchResult) -> None:
    report = {
        **environment(),
        "options": {**asdict(options), "output": str(options.output), "target": target},
        "rows": [asdict(row) for row in result.rows],
        "transformers": [asdict(row) for row in result.baselines],
    }
    write_report(options.output, "bench", report, format_tables(result))


def format_tables(result: BenchResult) -> str:
    """The figures as Markdown tables, times in milliseconds."""
    columns: dict[str, Callable[[Row], str]] = {
        "concurrency": lambda row: str(row.concurrency),
        "gamma": lambda row: str(row.gamma),
        "tokens/s": lambda row: f"{row.tokens_per_s:.1f}",
        "speed-up": lambda row: f"{row.speedup:.2f}",
        "alpha": lambda row: f"{row.alpha:.3f}",
        "tau": lambda row: f"{row.tau:.2f}",
        "first token ms": lambda row: f"{row.time_to_first_s * 1e3:.0f}",
        "draft ms": lambda row: f"{row.draft_s * 1e3:.2f}",
        "verify ms": lambda row: f"{row.verify_s * 1e3:.2f}",
        "of which steps ms": lambda row: f"{row.verify_compute_s * 1e3:.2f}",
        "router ms": lambda row: f"{row.router_s * 1e3:.2f}",
        "outside steps ms": lambda row: f"{row.outside_s * 1e3:.2f}",
    }
    tables = markdown_table(columns, result.rows)
    if result.baselines:
        baseline_columns: dict[str, Callable[[BaselineRow], str]] = {
            "transformers": lambda row: row.name,
            "streams": lambda row: str(row.num_streams),
            "tokens/s": lambda row: f"{row.tokens_per_s:.1f}",
        }
        tables += "\n" + markdown_table(baseline_columns, result.baselines)
    return tables
