"""What every benchmark's report has in common."""

import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch

RowT = TypeVar("RowT")

PACKAGES = ("tandem-serve", "torch", "transformers", "ray")
CPU_INFO = Path("/proc/cpuinfo")
GIB = 1024**3


def environment() -> dict[str, Any]:
    """When, of what and on what a report was made."""
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


def shown_options(options: Mapping[str, Any], **resolved: object) -> dict[str, Any]:
    """Options as JSON takes them, with what defaults were resolved to."""
    shown = {key: str(v) if isinstance(v, Path) else v for key, v in options.items()}
    return {**shown, **resolved}


def percentiles(values: Sequence[float], ranks: Sequence[int]) -> tuple[float, ...]:
    """Interpolated, of whatever order; none where there are no values."""
    return tuple(float(np.percentile(values, rank)) for rank in ranks) if values else ()


def milliseconds(*seconds: float) -> str:
    return " / ".join(f"{s * 1e3:.0f}" for s in seconds)


def number(value: float | None, form: str) -> str:
    """A table's cell; empty where there is no value."""
    return "" if value is None else format(value, form)


def markdown_table(columns: Mapping[str, Callable[[RowT], str]], rows: Sequence[RowT]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + " ---: |" * len(columns)]
    lines += ["| " + " | ".join(cell(row) for cell in columns.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def write_report(folder: Path, name: str, report: Mapping[str, Any], tables: str) -> None:
    """<name>.json with all figures, <name>.md with the tables."""
    (folder / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")
    (folder / f"{name}.md").write_text(tables)


def _commit() -> str:
    """With a mark where files differ from it: such figures are not the commit's own."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return "unknown"
    return f"{commit} with changes" if _git("status", "--porcelain") else commit


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
    """None where it is not installed: the workers' benchmarks run without Ray."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
