"""`tandem bench`: tokens per second by gamma and concurrency, on one live server."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from tqdm import tqdm

from cluster import bundled
from tandem.bench.baselines import BaselineRow, Baselines
from tandem.bench.plots import plot_speedups
from tandem.bench.report import markdown_table, write_report
from tandem.bench.rows import COLUMNS, Row, Sample, Setting, make_rows, make_settings
from tandem.bench.served import (
    ServedOptions,
    Server,
    header,
    measure,
    measured_server,
    target_name,
)
from tandem.bench.summary import (
    BatchRow,
    DynamicRow,
    beside_best_fixed,
    beside_static_batch,
    format_batches,
    format_dynamic,
)
from tandem.bench.texts import make_prompts
from workers.errors import ConfigError
from workers.model import load_config


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(ServedOptions):
    texts: tuple[str, ...]
    """Of `texts.KINDS`."""
    temperatures: tuple[float, ...]
    num_prompts: int
    concurrencies: tuple[int, ...]
    repeats: int
    with_baselines: bool
    """Whether transformers is measured too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    num_repeats: int
    rows: tuple[Row, ...]
    baselines: tuple[BaselineRow, ...]
    """Empty where they were not asked for."""

    @property
    def beside_best_fixed(self) -> list[DynamicRow]:
        return beside_best_fixed(self.rows)

    @property
    def beside_static_batch(self) -> list[BatchRow]:
        return beside_static_batch(self.rows, self.baselines)


def run_bench(options: BenchOptions) -> BenchResult:
    """Measure all settings interleaved; write JSON and Markdown tables below `options.output`.

    They are written after every repeat: an interruption loses only the one that runs.
    """
    _check_concurrencies(options)
    baselines = _load_baselines(options)
    with measured_server(options) as server:
        for result in _measure_repeats(options, server, baselines):
            _write(options, server, result)
    return result


def _write(options: BenchOptions, server: Server, result: BenchResult) -> None:
    report = {
        **header(options, server),
        "num_repeats": result.num_repeats,
        "rows": [asdict(row) for row in result.rows],
        "dynamic_beside_best_fixed": [asdict(row) for row in result.beside_best_fixed],
        "transformers": [asdict(row) for row in result.baselines],
        "beside_static_batch": [asdict(row) for row in result.beside_static_batch],
    }
    write_report(options.output, "bench", report, format_tables(result))
    if any(row.speedup for row in result.rows):
        plot_speedups(result.rows, options.output / "speedup.png")


def _measure_repeats(
    options: BenchOptions, server: Server, baselines: Baselines | None
) -> Iterator[BenchResult]:
    """Everything once per repeat, in turns; after each, the result of all until then."""
    prompts = {
        text: make_prompts(text, options.num_prompts, seed=options.seed) for text in options.texts
    }
    settings = make_settings(
        texts=options.texts,
        temperatures=options.temperatures,
        concurrencies=options.concurrencies,
        gammas=options.gammas,
    )
    samples: dict[Setting, list[Sample]] = {setting: [] for setting in settings}
    names = baselines.names if baselines is not None else ()
    speeds: dict[tuple[str, str], list[float]] = {
        (text, name): [] for text in options.texts for name in names
    }
    for setting in samples:  # the first of everything is slower
        measure(server, setting, prompts[setting.text][:2], options.max_tokens)
    progress = tqdm(total=(len(samples) + len(speeds)) * options.repeats, desc="bench")
    for repeat in range(options.repeats):
        for setting, of_setting in samples.items():
            of_setting.append(measure(server, setting, prompts[setting.text], options.max_tokens))
            progress.update()
        for (text, name), of_name in speeds.items():
            assert baselines is not None
            of_name.append(baselines.tokens_per_s(name, prompts[text], options.max_tokens))
            progress.update()
        yield BenchResult(
            num_repeats=repeat + 1,
            rows=tuple(make_rows(samples)),
            baselines=tuple(
                BaselineRow(text=text, name=name, tokens_per_s=median(of_name))
                for (text, name), of_name in speeds.items()
            ),
        )
    progress.close()


def _load_baselines(options: BenchOptions) -> Baselines | None:
    target = target_name(options)
    if not options.with_baselines or target is None:
        return None
    draft = options.draft
    if draft is None and options.remote is None:
        draft = bundled.DRAFT_NAME
    target, draft = bundled.resolve(target), bundled.resolve(draft) if draft else None
    for name in filter(None, (target, draft)):
        load_config(name)  # raises what a user can read
    return Baselines(target, draft)


def _check_concurrencies(options: BenchOptions) -> None:
    most = max(options.concurrencies)
    if most > options.num_prompts:
        raise ConfigError(
            f"--concurrencies has {most}, but with --num-prompts {options.num_prompts} only that "
            f"many streams would run; give at least --num-prompts {most}"
        )


def format_tables(result: BenchResult) -> str:
    """The figures as Markdown tables, times in milliseconds."""
    tables = [markdown_table(COLUMNS, result.rows)]
    if result.beside_best_fixed:
        tables.append(format_dynamic(result.beside_best_fixed))
    if result.baselines:
        tables.append(_format_baselines(result.baselines))
    if result.beside_static_batch:
        tables.append(format_batches(result.beside_static_batch))
    return "\n".join(tables)


def _format_baselines(baselines: Sequence[BaselineRow]) -> str:
    columns: dict[str, Callable[[BaselineRow], str]] = {
        "text": lambda row: row.text,
        "transformers": lambda row: row.name,
        "tokens/s": lambda row: f"{row.tokens_per_s:.1f}",
    }
    return markdown_table(columns, baselines)
