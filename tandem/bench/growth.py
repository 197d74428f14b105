"""`tandem bench growth`: what a step costs as context, batch and drafts grow.

The workers alone, without Ray and without hops. One thing grows at a time: the context of a single
sequence, the number of sequences, or the draft length.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from tandem.bench.plots import plot_growth
from tandem.bench.report import environment, markdown_table, shown_options, write_report
from tandem.bench.steps import (
    Context,
    EngineOptions,
    compile_workers,
    drafting,
    load_models,
    make_context,
    make_drafter,
    make_target,
    median_times,
    verification,
)
from workers.drafters.model import ModelDrafter
from workers.errors import ConfigError
from workers.target import Target

logger = logging.getLogger(__name__)

CONTEXT_LENS = (128, 256, 512, 1024, 2048, 4096)
NUM_TOKENS = (1, 5)
"""Run at each of these contexts: plain decoding, and a verification of four drafts."""
NUM_SEQUENCES = (1, 2, 4, 8, 16, 32)
MOST_DRAFTS = 12
CONTEXT_LEN = 200
"""Where something else grows."""
CONTEXT, SEQUENCES, DRAFTS = "context tokens", "sequences", "draft tokens"
SLOPE_UNITS = {
    CONTEXT: (1000, "further 1000 tokens of context"),
    SEQUENCES: (1, "further sequence"),
    DRAFTS: (1, "further draft token"),
}
"""A slope is told per so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    size: int
    """Of what grows."""
    num_tokens: int
    """Run by the target, or drafted, in a step."""
    step_s: float
    """The median."""

    @property
    def token_s(self) -> float:
        return self.step_s / self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The straight line through step times, by least squares."""

    start_s: float
    """At size 0."""
    slope_s: float
    """Per further unit of what grows."""
    r_squared: float
    """The share of the variance that the line explains: what is no line shows here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The times of a step while one thing grows."""

    step: str
    grows: str
    """CONTEXT, SEQUENCES or DRAFTS."""
    points: tuple[Point, ...]

    @property
    def fit(self) -> Fit:
        return fit_line([p.size for p in self.points], [p.step_s for p in self.points])


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    max_position: int
    """The longest sequence that the target's positions allow."""
    series: tuple[Series, ...]

    def of(self, grows: str) -> list[Series]:
        return [series for series in self.series if series.grows == grows]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A point that is yet to be measured."""

    step: str
    grows: str
    size: int
    num_tokens: int
    run: Callable[[], object]


def run_growth(options: EngineOptions) -> Growth:
    """Measure all points in turns; write JSON, tables and a plot below `options.output`."""
    target_model, draft_model = load_models(options)
    vocab_size = min(target_model.vocab_size, draft_model.vocab_size)
    room = max(NUM_TOKENS) - 1
    alone = [
        make_context(f"alone-{length}", length, room=room, vocab_size=vocab_size)
        for length in fitting_lens(target_model.max_position - room)
    ]
    batch = [
        make_context(str(index), CONTEXT_LEN, room=MOST_DRAFTS, vocab_size=vocab_size)
        for index in range(max(NUM_SEQUENCES))
    ]
    target = make_target(target_model, [*alone, *batch])
    drafter = make_drafter(draft_model, batch[:1])
    if options.with_compile:
        compile_workers(target, drafter)
    steps = [*_target_steps(target, alone, batch), *_draft_steps(drafter, batch[:1])]
    times = median_times([step.run for step in steps], options.repeats, name="growth")
    growth = Growth(max_position=target_model.max_position, series=_series(steps, times))
    report = {
        **environment(),
        "options": shown_options(asdict(options), target=target_model.name),
        "max_position": growth.max_position,
        "context_len": CONTEXT_LEN,
        "series": [{**asdict(series), "fit": asdict(series.fit)} for series in growth.series],
    }
    write_report(options.output, "growth", report, format_tables(growth))
    plot_growth(growth, options.output / "growth.png")
    return growth


def fitting_lens(longest: int) -> list[int]:
    """The contexts to measure; in place of those that do not fit, the longest that does.

    Raises ConfigError if not even the shortest fits.
    """
    fitting = [length for length in CONTEXT_LENS if length <= longest]
    if not fitting:
        raise ConfigError(
            f"the target has positions for {longest} tokens of context, and the shortest measured "
            f"is {CONTEXT_LENS[0]}; give a model with more"
        )
    if len(fitting) == len(CONTEXT_LENS):
        return fitting
    logger.info(
        "the target has positions for %d tokens of context and drafts after them: measured up to "
        "there, not to %d",
        longest,
        CONTEXT_LENS[-1],
    )
    return fitting if longest in fitting else [*fitting, longest]


def fit_line(sizes: Sequence[float], times_s: Sequence[float]) -> Fit:
    slope, start = np.polyfit(sizes, times_s, 1)
    errors = np.asarray(times_s) - (start + slope * np.asarray(sizes))
    variance = float(np.var(times_s))
    return Fit(
        start_s=float(start),
        slope_s=float(slope),
        r_squared=1.0 - float(np.mean(errors**2)) / variance if variance else 1.0,
    )


def _target_steps(
    target: Target, alone: Sequence[Context], batch: Sequence[Context]
) -> Iterator[_Step]:
    def step(name: str, grows: str, size: int, of: Sequence[Context], num_tokens: int) -> _Step:
        return _Step(
            step=name,
            grows=grows,
            size=size,
            num_tokens=len(of) * num_tokens,
            run=verification(target, of, num_tokens),
        )

    for context in alone:
        for num_tokens in NUM_TOKENS:
            name = f"verify {num_tokens} token{'s' if num_tokens > 1 else ''}"
            yield step(name, CONTEXT, len(context.tokens), [context], num_tokens)
    for num_sequences in NUM_SEQUENCES:
        yield step("verify 1 token each", SEQUENCES, num_sequences, batch[:num_sequences], 1)
    for num_drafts in range(MOST_DRAFTS + 1):
        yield step("verify", DRAFTS, num_drafts, batch[:1], num_drafts + 1)


def _draft_steps(drafter: ModelDrafter, batch: Sequence[Context]) -> Iterator[_Step]:
    for num_drafts in range(1, MOST_DRAFTS + 1):
        run = drafting(drafter, batch, num_drafts)
        yield _Step(step="propose", grows=DRAFTS, size=num_drafts, num_tokens=num_drafts, run=run)


def _series(steps: Sequence[_Step], times_s: Sequence[float]) -> tuple[Series, ...]:
    points: dict[tuple[str, str], list[Point]] = {}
    for step, step_s in zip(steps, times_s, strict=True):
        point = Point(size=step.size, num_tokens=step.num_tokens, step_s=step_s)
        points.setdefault((step.grows, step.step), []).append(point)
    return tuple(
        Series(step=step, grows=grows, points=tuple(of_series))
        for (grows, step), of_series in points.items()
    )


def format_tables(growth: Growth) -> str:
    """A Markdown table for each thing that grows, and one of the lines through them."""
    tables = [_points_table(growth.of(grows)) for grows in (CONTEXT, SEQUENCES, DRAFTS)]
    positions = f"The target has positions for {growth.max_position} tokens.\n"
    return "\n".join([*tables, _fits_table(growth), positions])


def _points_table(all_series: Sequence[Series]) -> str:
    """Times of all series in milliseconds, by size."""
    by_size = [{point.size: point for point in series.points} for series in all_series]

    def cell(index: int, shown: Callable[[Point], float]) -> Callable[[int], str]:
        points = by_size[index]
        return lambda size: f"{shown(points[size]) * 1e3:.2f}" if size in points else ""

    columns: dict[str, Callable[[int], str]] = {all_series[0].grows: str}
    for index, series in enumerate(all_series):
        columns[f"{series.step} ms"] = cell(index, lambda point: point.step_s)
        columns[f"{series.step}, per token ms"] = cell(index, lambda point: point.token_s)
    return markdown_table(columns, sorted({size for points in by_size for size in points}))


def _fits_table(growth: Growth) -> str:
    def slope(series: Series) -> str:
        num, unit = SLOPE_UNITS[series.grows]
        return f"{series.fit.slope_s * num * 1e3:.2f} ms per {unit}"

    columns: dict[str, Callable[[Series], str]] = {
        "step": lambda series: series.step,
        "line at 0 ms": lambda series: f"{series.fit.start_s * 1e3:.2f}",
        "slope": slope,
        "R2": lambda series: f"{series.fit.r_squared:.3f}",
    }
    return markdown_table(columns, growth.series)
