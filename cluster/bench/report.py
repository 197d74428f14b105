"""What every benchmark's report has in common."""

import json
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

RowT = TypeVar("RowT")


def environment() -> dict[str, Any]:
    """When, of what and on what a report was made."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "hardware": {
            "machine": platform.machine(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "num_threads": torch.get_num_threads(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def markdown_table(columns: Mapping[str, Callable[[RowT], str]], rows: Sequence[RowT]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + " ---: |" * len(columns)]
    lines += ["| " + " | ".join(cell(row) for cell in columns.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def write_report(folder: Path, name: str, report: Mapping[str, Any], tables: str) -> None:
    """<name>.json with all figures, <name>.md with the tables."""
    (folder / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")
    (folder / f"{name}.md").write_text(tables)


def _commit() -> str:
    result = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.strip() or "unknown"
