"""PNG plots of a report."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from cluster.bench.rows import Row
from cluster.bench.traffic import Phase

DPI = 120


def plot_speedups(rows: Sequence[Row], path: Path) -> None:
    """Speed-up over gamma 0 against the number of streams, a line per text, temperature, gamma."""
    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.speedup and row.setting.gamma != 0:
            setting = row.setting
            label = f"{setting.text}, T {setting.temperature:g}, gamma {setting.gamma}"
            lines.setdefault(label, []).append((setting.concurrency, row.speedup))
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xlabel="streams", ylabel="speed-up over gamma 0", ylim=(0, None))
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=DPI, bbox_inches="tight")


def plot_traffic(phases: Sequence[Phase], path: Path) -> None:
    """The mean draft length of every round, through all phases."""
    figure = Figure(figsize=(8, 3.5))
    axes = figure.subplots()
    start = 0
    for phase in phases:
        end = start + len(phase.gammas)
        axes.plot(range(start, end), phase.gammas, linewidth=0.8)
        axes.axvline(start, color="grey", linewidth=0.8)
        axes.text(start, axes.get_ylim()[1], f" {phase.text}", va="top")
        start = end
    axes.set(xlabel="round", ylabel="draft length chosen", ylim=(0, None))
    figure.savefig(path, dpi=DPI, bbox_inches="tight")
