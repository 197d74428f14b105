"""`tandem bench <subject>`: the options of each, and what runs it."""

import argparse
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import bundled
from tandem.bench.arguments import OPTIONS, remote_options, shown, with_baselines
from tandem.bench.compare import compare, format_comparison
from workers.errors import ConfigError

if TYPE_CHECKING:
    from tandem.bench.remote import RemoteOptions
    from tandem.bench.steps import EngineOptions

logger = logging.getLogger(__name__)

DEFAULT_SUBJECT = "app"
DEFAULT_GAMMAS = (0, 4, "dynamic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What can be measured."""

    help: str
    run: Callable[[argparse.Namespace], str]
    """Returns the tables."""
    options: tuple[str, ...]
    """Of OPTIONS."""
    defaults: Mapping[str, Any] = field(default_factory=dict)


def add_bench(commands: Any) -> None:
    """`commands`: what `add_subparsers` returns; argparse keeps its type to itself."""
    bench = commands.add_parser(
        "bench",
        help="measure a live app, or the workers alone",
        description=f"Without a subject: {DEFAULT_SUBJECT}.",
    )
    subjects = bench.add_subparsers(dest="subject", required=True, metavar="subject")
    for name, subject in SUBJECTS.items():
        parser = subjects.add_parser(name, help=subject.help, description=subject.help)
        defaults = {**DEFAULTS, **subject.defaults}
        for option in subject.options:
            described = OPTIONS[option]
            default = defaults.get(option.lstrip("-").replace("-", "_"))
            by_default = "" if default is None else f" (default: {shown(default)})"
            parser.add_argument(option, **{**described, "help": described["help"] + by_default})
        parser.set_defaults(run=partial(_run, subject), **defaults)


def with_default_subject(arguments: list[str]) -> list[str]:
    """`bench` alone, or with options only, measures an app."""
    if arguments[:1] != ["bench"]:
        return arguments
    has_subject = len(arguments) > 1 and not arguments[1].startswith("-")
    if has_subject or arguments[1:2] in (["-h"], ["--help"]):
        return arguments
    return ["bench", DEFAULT_SUBJECT, *arguments[1:]]


def _run(subject: Subject, options: argparse.Namespace) -> None:
    logger.info("%s", subject.run(options))


# Imported where they are used: an app needs Ray; engine, growth, exact and --url do without.


def _app(options: argparse.Namespace) -> str:
    from tandem.bench.run import BenchOptions, format_tables, run_bench

    served = _served(options, remote=remote_options(options, others=("gammas", "compile")))
    result = run_bench(
        BenchOptions(
            **served,
            **_texts(options),
            concurrencies=tuple(options.concurrencies),
            num_prompts=options.num_prompts,
            repeats=options.repeats,
            with_baselines=with_baselines(options),
        )
    )
    return format_tables(result)


def _open(options: argparse.Namespace) -> str:
    from tandem.bench.open_loop import OpenOptions, format_table, run_open_loop

    others = ("gammas", "compile", "target", "draft")
    served = _served(options, remote=remote_options(options, others=others))
    rows = run_open_loop(
        OpenOptions(
            **served,
            **_texts(options),
            rates=tuple(options.rates),
            num_prompts=options.num_prompts,
        )
    )
    return format_table(rows)


def _long_prompt(options: argparse.Namespace) -> str:
    from tandem.bench.long_prompt import LongPromptOptions, format_table, run_long_prompt

    rows = run_long_prompt(
        LongPromptOptions(
            **_served(options),
            **_texts(options),
            concurrencies=tuple(options.concurrencies),
            long_tokens=options.long_tokens,
            alone_s=options.alone_s,
            repeats=options.repeats,
        )
    )
    return format_table(rows)


def _traffic(options: argparse.Namespace) -> str:
    from tandem.bench.traffic import TrafficOptions, format_table, run_traffic

    served = {**_served(options), "gammas": ("dynamic",)}
    return format_table(run_traffic(TrafficOptions(**served, num_prompts=options.num_prompts)))


def _engine(options: argparse.Namespace) -> str:
    from tandem.bench.engine import format_table, run_engine_bench

    return format_table(run_engine_bench(_engine_options(options)))


def _growth(options: argparse.Namespace) -> str:
    from tandem.bench.growth import format_tables, run_growth

    return format_tables(run_growth(_engine_options(options)))


def _exact(options: argparse.Namespace) -> str:
    from tandem.bench.exactness import ExactnessOptions, format_table, run_exactness

    rows = run_exactness(
        ExactnessOptions(
            target=options.target,
            draft=options.draft or bundled.DRAFT_NAME,
            num_prompts=options.num_prompts,
            max_tokens=options.max_tokens,
            with_compile=options.compile is not False,
            output=options.output,
        )
    )
    return format_table(rows)


def _compare(options: argparse.Namespace) -> str:
    if len(options.reports) != 2:
        raise ConfigError(f"compare takes two reports, not {len(options.reports)}")
    return format_comparison(compare(*options.reports))


def _served(
    options: argparse.Namespace, *, remote: "RemoteOptions | None" = None
) -> dict[str, Any]:
    """The fields of ServedOptions."""
    from tandem.bench.rows import AS_SERVED

    gammas = (AS_SERVED,) if remote is not None else tuple(options.gammas or DEFAULT_GAMMAS)
    return {
        "remote": remote,
        "target": options.target,
        "draft": options.draft,
        "gammas": gammas,
        "max_tokens": options.max_tokens,
        "seed": options.seed,
        "with_compile": options.compile is not False,
        "output": options.output,
    }


def _texts(options: argparse.Namespace) -> dict[str, Any]:
    return {"texts": tuple(options.texts), "temperatures": tuple(options.temperatures)}


def _engine_options(options: argparse.Namespace) -> "EngineOptions":
    from tandem.bench.steps import EngineOptions

    return EngineOptions(
        target=options.target,
        draft=options.draft or bundled.DRAFT_NAME,
        repeats=options.repeats,
        num_threads=options.num_threads,
        with_compile=options.compile is not False,
        output=options.output,
    )


MODELS = ("--target", "--draft", "--compile", "--output")
REMOTE = ("--url", "--model", "--ignore-eos")
TEXTS = ("--texts", "--temperatures", "--max-tokens", "--seed")
ENGINE = (*MODELS, "--repeats", "--num-threads")

DEFAULTS: dict[str, Any] = {
    "output": Path("bench-results"),
    "concurrencies": [1],
    "num_prompts": 8,
    "max_tokens": 128,
    "texts": ["easy"],
    "temperatures": [0.0],
    "seed": 0,
    "repeats": 3,
    "gammas": None,
}

SUBJECTS = {
    "app": Subject(
        help="speculation against plain decoding and transformers, on a live app",
        run=_app,
        options=(
            *MODELS,
            *REMOTE,
            *TEXTS,
            "--gammas",
            "--concurrencies",
            "--num-prompts",
            "--repeats",
            "--baselines",
        ),
    ),
    "open": Subject(
        help="requests that arrive at given rates, up to where the app is saturated",
        run=_open,
        options=(*MODELS, *REMOTE, *TEXTS, "--gammas", "--rates", "--num-prompts"),
        defaults={"rates": [0.25, 0.5, 1.0, 2.0], "num_prompts": 16},
    ),
    "long-prompt": Subject(
        help="what a long prompt does to the streams that run",
        run=_long_prompt,
        options=(
            *MODELS,
            *TEXTS,
            "--gammas",
            "--concurrencies",
            "--long-tokens",
            "--alone-s",
            "--repeats",
        ),
        defaults={"concurrencies": [4], "max_tokens": 8, "alone_s": 5.0},
    ),
    "traffic": Subject(
        help="a dynamic gamma while the text changes",
        run=_traffic,
        options=(*MODELS, "--num-prompts", "--max-tokens", "--seed"),
    ),
    "engine": Subject(
        help="the workers without Ray", run=_engine, options=ENGINE, defaults={"repeats": 20}
    ),
    "growth": Subject(
        help="what a step costs as context, batch and drafts grow, without Ray",
        run=_growth,
        options=ENGINE,
        defaults={"repeats": 20},
    ),
    "exact": Subject(
        help="where texts differ from plain decoding",
        run=_exact,
        options=(*MODELS, "--num-prompts", "--max-tokens"),
    ),
    "compare": Subject(help="two reports", run=_compare, options=("reports",)),
}
