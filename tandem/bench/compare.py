"""`tandem bench compare a.json b.json`: two reports, row by row."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.bench.report import markdown_table
from workers.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The speeds of a setting that both reports have, in tokens per second."""

    name: str
    before: float
    after: float


def compare(before: Path, after: Path) -> list[Comparison]:
    """The settings that both have, in the order of the first; raises ConfigError if there are none.

    Between two runs the machine may have changed as much as the code: look at transformers' rows.
    """
    speeds_before, speeds_after = _speeds(before), _speeds(after)
    common = [name for name in speeds_before if name in speeds_after]
    if not common:
        raise ConfigError(
            f"{before} and {after} have no setting in common; the first has "
            f"{', '.join(speeds_before) or 'none'}"
        )
    return [
        Comparison(name=name, before=speeds_before[name], after=speeds_after[name])
        for name in common
    ]


def format_comparison(comparisons: list[Comparison]) -> str:
    columns: dict[str, Callable[[Comparison], str]] = {
        "setting": lambda row: row.name,
        "before, tokens/s": lambda row: f"{row.before:.1f}",
        "after, tokens/s": lambda row: f"{row.after:.1f}",
        "ratio": lambda row: f"{row.after / row.before:.2f}",
    }
    return markdown_table(columns, comparisons)


def _speeds(path: Path) -> dict[str, float]:
    try:
        report: dict[str, Any] = json.loads(path.read_text())
        speeds = {_name(row["setting"]): float(row["tokens_per_s"]) for row in report["rows"]}
        for row in report["transformers"]:
            speeds[f"{row['text']}, transformers, {row['name']}"] = float(row["tokens_per_s"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no report of `bench`: {error!r}") from error
    return speeds


def _name(setting: dict[str, Any]) -> str:
    return (
        f"{setting['text']}, T {setting['temperature']:g}, {setting['concurrency']} streams, "
        f"gamma {setting['gamma']}"
    )
