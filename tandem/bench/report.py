"""Results: one page of Markdown per day and machine, and a JSON file with all figures beside it."""

import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil

from workers.cache_size import GIB

RowT = TypeVar("RowT")

PACKAGES = ("tandem-serve", "torch", "transformers", "ray")
CPU_INFO = Path("/proc/cpuinfo")


def environment() -> dict[str, Any]:
    """The date, the commit, the machine and the versions of a result."""
    import torch  # `--help` comes without imports that take seconds

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "hardware": {
            "machine": platform.machine(),
            "cpu": _cpu_name(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "num_cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "num_threads": torch.get_num_threads(),
        },
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in PACKAGES},
        },
    }


def machine_name(hardware: Mapping[str, Any]) -> str:
    """A name for files, like `amd-epyc-9b45-2-cores`."""
    name = hardware["gpu"] or f"{hardware['cpu']} {hardware['num_cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def write_result(folder: Path, command: str, tables: str, figures: Mapping[str, Any]) -> Path:
    """Add what a command measured to today's page of this machine; returns the page.

    The same command of the same day takes the place of its earlier result.
    """
    made = environment()
    page = folder / f"{made['date'][:10]}-{machine_name(made['hardware'])}.md"
    data = page.with_suffix(".json")
    results = json.loads(data.read_text()) if data.exists() else {}
    results[command] = {**made, "tables": tables, **_plain(figures)}
    folder.mkdir(parents=True, exist_ok=True)
    data.write_text(json.dumps(results, indent=2) + "\n")
    page.write_text(_page(results))
    return page


def percentiles(values: Sequence[float], ranks: Sequence[int]) -> tuple[float, ...]:
    """Interpolated percentiles of values in any order; none where there are no values."""
    return tuple(float(np.percentile(values, rank)) for rank in ranks) if values else ()


def milliseconds(*seconds: float) -> str:
    """Seconds as whole milliseconds, for one cell."""
    return " / ".join(f"{s * 1e3:.0f}" for s in seconds)


def number(value: float | None, form: str) -> str:
    """A table's cell; empty where there is no value."""
    return "" if value is None else format(value, form)


def markdown_table(columns: Mapping[str, Callable[[RowT], str]], rows: Sequence[RowT]) -> str:
    """A table with a line per row."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " ---: |" * len(columns)]
    lines += ["| " + " | ".join(cell(row) for cell in columns.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _page(results: Mapping[str, Any]) -> str:
    newest = max(results.values(), key=lambda result: str(result["date"]))
    hardware, versions = newest["hardware"], newest["versions"]
    device = hardware["gpu"] or f"{hardware['cpu']} ({hardware['cpu_capability']})"
    lines = [
        f"# Results of {newest['date'][:10]}",
        "",
        f"{device}, {hardware['num_cores']} cores, {hardware['memory_gib']} GiB of memory; "
        + ", ".join(f"{name} {number}" for name, number in versions.items() if number)
        + ". Written by `tandem bench`; [benchmarking](../benchmarking.md) explains the columns.",
    ]
    for command, result in results.items():
        lines += [
            "",
            f"## `{command}`",
            "",
            f"Commit {result['commit']}.",
            "",
            result["tables"].rstrip(),
        ]
    return "\n".join(lines).rstrip() + "\n"


def _plain(value: Any) -> Any:
    """Dataclasses, paths and tuples as JSON has them."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def _commit() -> str:
    """The commit, with a mark where files differ from it: such figures are not its own.

    Other than results, which the last command may have written.
    """
    commit = _git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    changes = _git("status", "--porcelain", "--", ":(top)", ":(top,exclude)docs/results")
    return f"{commit} with changes" if changes else commit


def _git(*arguments: str) -> str:
    try:
        result = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # there is no git
        return ""
    return result.stdout.strip()


def _cpu_name() -> str:
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(package: str) -> str | None:
    """The version of a package; None where it is not installed: the workers' benchmarks run without
    Ray."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
