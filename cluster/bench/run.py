"""`python -m cluster bench`: tokens per second by gamma and concurrency, on one live server."""

import asyncio
import json
import logging
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from tqdm import tqdm

from cluster.bench.client import Load, LoadResult, run_load
from cluster.bench.server import LiveServer, live_server
from cluster.demo import bundled
from cluster.demo.corpus import Corpus, held_out_prompts
from cluster.demo.grow import GrownSize, grow_to_folder

logger = logging.getLogger(__name__)

MODEL_NAME = "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    target: str | None
    """None grows the bundled target to 287M parameters."""
    draft: str
    gammas: tuple[int, ...]
    concurrencies: tuple[int, ...]
    num_prompts: int
    max_tokens: int
    temperature: float
    repeats: int
    output: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians over the repeats of one setting; times in seconds."""

    concurrency: int
    gamma: int
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
    served_s: float
    """Of verify_s, the time within the target."""
    router_s: float
    """The router's own time per round."""


def run_bench(options: BenchOptions) -> list[Row]:
    """Measure all settings interleaved, write JSON and a Markdown table, return the rows."""
    options.output.mkdir(parents=True, exist_ok=True)
    target = options.target or _grown_target(options.output)
    prompts = held_out_prompts(Corpus.load(), options.num_prompts)
    server_options = {
        "target": target,
        "draft": options.draft,
        "served_model_name": MODEL_NAME,
        "num_speculative_tokens": str(max(*options.gammas, 1)),
        "gamma": "0",
    }
    settings = [(c, g) for c in options.concurrencies for g in options.gammas]
    samples: dict[tuple[int, int], list[_Sample]] = {setting: [] for setting in settings}
    with live_server(server_options, options.output / "server.log") as server:
        for setting in settings:  # the first of everything is slower
            _measure(server, options, prompts[:2], *setting)
        for concurrency, gamma in tqdm(settings * options.repeats, desc="bench"):
            sample = _measure(server, options, prompts, concurrency, gamma)
            samples[concurrency, gamma].append(sample)
    rows = _rows(samples)
    _write(options, target, rows)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    load: LoadResult
    statistics: Any


def _measure(
    server: LiveServer,
    options: BenchOptions,
    prompts: Sequence[str],
    concurrency: int,
    gamma: int,
) -> _Sample:
    server.set_gamma(gamma)
    server.take_statistics()
    load = Load(
        prompts=prompts,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        concurrency=concurrency,
    )
    result = asyncio.run(run_load(server.url, MODEL_NAME, load))
    return _Sample(load=result, statistics=server.take_statistics())


def _rows(samples: dict[tuple[int, int], list[_Sample]]) -> list[Row]:
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
                served_s=median(s.served_s for s in statistics),
                router_s=median(s.router_s for s in statistics),
            )
        )
    return rows


def _grown_target(output: Path) -> str:
    folder = output / "grown-target"
    if not (folder / "config.json").exists():
        num_parameters = grow_to_folder(bundled.resolve(bundled.TARGET_NAME), folder, GrownSize())
        logger.info("grew the bundled target to %.0fM parameters", num_parameters / 1e6)
    return str(folder)


def _write(options: BenchOptions, target: str, rows: list[Row]) -> None:
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "hardware": {"machine": platform.machine(), "num_threads": torch.get_num_threads()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "options": {**asdict(options), "output": str(options.output), "target": target},
        "rows": [asdict(row) for row in rows],
    }
    (options.output / "bench.json").write_text(json.dumps(report, indent=2) + "\n")
    (options.output / "bench.md").write_text(format_table(rows))


def format_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, times in milliseconds."""
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
        "of which in the target ms": lambda row: f"{row.served_s * 1e3:.2f}",
        "router ms": lambda row: f"{row.router_s * 1e3:.2f}",
    }
    lines = ["| " + " | ".join(columns) + " |", "|" + " ---: |" * len(columns)]
    lines += ["| " + " | ".join(cell(row) for cell in columns.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _commit() -> str:
    result = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.strip() or "unknown"
