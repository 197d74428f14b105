"""PNG plots of a report."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from tandem.bench.growth import Growth
    from tandem.bench.open_loop import OpenRow
    from tandem.bench.rows import Row
    from tandem.bench.traffic import Phase

DPI = 120


def plot_speedups(rows: "Sequence[Row]", path: Path) -> None:
    """Speed-up over gamma 0 against the number of streams, a line per text, temperature, gamma."""
    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.speedup is not None and row.setting.gamma != 0:
            setting = row.setting
            label = f"{setting.text}, T {setting.temperature:g}, gamma {setting.gamma}"
            lines.setdefault(label, []).append((setting.concurrency, row.speedup))
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xlabel="streams", ylabel="speed-up over gamma 0", ylim=(0, None))
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=DPI, bbox_inches="tight")


def plot_traffic(phases: "Sequence[Phase]", path: Path) -> None:
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


def plot_growth(growth: "Growth", path: Path) -> None:
    """A panel for each thing that grows; dots were measured, lines are fitted."""
    panels = list(dict.fromkeys(series.grows for series in growth.series))
    figure = Figure(figsize=(4.5 * len(panels), 4), layout="constrained")
    for axes, grows in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for series in growth.of(grows):
            sizes = [point.size for point in series.points]
            fit = series.fit
            (dots,) = axes.plot(
                sizes, [point.step_s * 1e3 for point in series.points], "o", label=series.step
            )
            ends = (min(sizes), max(sizes))
            line = [(fit.start_s + fit.slope_s * size) * 1e3 for size in ends]
            axes.plot(ends, line, color=dots.get_color(), linewidth=0.8)
        axes.set(xlabel=grows, ylabel="ms per step", ylim=(0, None))
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=DPI, bbox_inches="tight")


def plot_open(rows: "Sequence[OpenRow]", path: Path) -> None:
    """Tokens per second and p95 to the first token against the rate; crosses are saturated."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    speed_axes, first_axes = figure.subplots(1, 2)
    lines: dict[str, list[OpenRow]] = {}
    for row in rows:
        if not row.time_to_first_s:  # no request brought any text
            continue
        setting = row.setting
        label = f"{setting.text}, T {setting.temperature:g}, gamma {setting.gamma}"
        lines.setdefault(label, []).append(row)
    for label, of_line in lines.items():
        rates = [row.setting.rate for row in of_line]
        (line,) = speed_axes.plot(
            rates, [row.tokens_per_s for row in of_line], marker="o", label=label
        )
        first_axes.plot(rates, [row.time_to_first_s[1] for row in of_line], marker="o", label=label)
        for row in of_line:
            if row.is_saturated:
                style = {"marker": "x", "markersize": 12, "color": line.get_color()}
                speed_axes.plot(row.setting.rate, row.tokens_per_s, **style)
                first_axes.plot(row.setting.rate, row.time_to_first_s[1], **style)
    speed_axes.set(xlabel="requests/s offered", ylabel="tokens/s completed", ylim=(0, None))
    first_axes.set(xlabel="requests/s offered", ylabel="p95 to the first token, s", ylim=(0, None))
    speed_axes.legend(fontsize="small")
    figure.savefig(path, dpi=DPI, bbox_inches="tight")
