"""Command line: `python -m cluster <command>`."""

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.bench.compare import compare, format_comparison
from cluster.bench.texts import KINDS
from cluster.demo import bundled
from cluster.demo.grow import GrownSize, grow_to_folder
from cluster.demo.pair import train_pair
from workers.errors import ConfigError, TandemError

if TYPE_CHECKING:
    from cluster.bench.run import BenchOptions

logger = logging.getLogger(__name__)

Commands = Any
"""What `add_subparsers` returns; argparse keeps its type to itself."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    _add_demo(commands)
    _add_bench(commands)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would write a line per request
    try:
        options.run(options)
    except TandemError as error:
        logger.error("%s", error)
        return 1
    return 0


def _add_demo(commands: Commands) -> None:
    train = commands.add_parser("demo-train", help="train the bundled model pair from nothing")
    train.add_argument("--output", type=Path, required=True, help="folder to write the pair to")
    train.add_argument("--target-steps", type=int, default=3000)
    train.add_argument("--draft-steps", type=int, default=5000)
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--eager", action="store_true", help="do not compile the training step")
    train.set_defaults(run=_demo_train)

    grow = commands.add_parser("demo-grow", help="grow a model without changing its function")
    grow.add_argument("--source", default=bundled.TARGET_NAME, help="a Llama to grow")
    grow.add_argument("--output", type=Path, required=True, help="folder to write to")
    size = GrownSize()
    grow.add_argument("--hidden-size", type=int, default=size.hidden_size)
    grow.add_argument("--intermediate-size", type=int, default=size.intermediate_size)
    grow.add_argument("--num-layers", type=int, default=size.num_layers)
    grow.add_argument("--seed", type=int, default=0)
    grow.set_defaults(run=_demo_grow)


def _add_bench(commands: Commands) -> None:
    bench = commands.add_parser("bench", help="measure a live app, or the workers alone")
    bench.add_argument(
        "subject",
        nargs="?",
        choices=("app", "traffic", "engine", "exact", "compare"),
        default="app",
        help="app: speculation against plain decoding and transformers, on a live app (default); "
        "traffic: a dynamic gamma while the text changes; "
        "engine: the workers without Ray; exact: where texts differ from plain decoding; "
        "compare: two reports",
    )
    bench.add_argument("reports", type=Path, nargs="*", help="the two to compare")
    bench.add_argument("--target", help="by default the bundled target grown to 287M parameters")
    bench.add_argument("--draft", default=bundled.DRAFT_NAME)
    bench.add_argument(
        "--gammas",
        type=lambda text: text if text == "dynamic" else int(text),
        nargs="+",
        default=[0, 4, "dynamic"],
        help="draft lengths to compare: numbers, or dynamic",
    )
    bench.add_argument("--concurrencies", type=int, nargs="+", default=[1])
    bench.add_argument("--num-prompts", type=int, default=8)
    bench.add_argument("--max-tokens", type=int, default=128)
    bench.add_argument("--texts", nargs="+", choices=KINDS, default=["easy"])
    bench.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    bench.add_argument("--repeats", type=int, help="by default 3 of an app, 20 of the engine")
    bench.add_argument(
        "--baselines",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure transformers in the same run",
    )
    bench.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure compiled forwards, once they are there",
    )
    bench.add_argument("--num-threads", type=int, help="of the CPU, for the engine")
    bench.add_argument("--output", type=Path, default=Path("bench-results"))
    bench.set_defaults(run=_bench)


def _demo_train(options: argparse.Namespace) -> None:
    command = (
        f"python -m cluster demo-train --target-steps {options.target_steps} "
        f"--draft-steps {options.draft_steps} --seed {options.seed}"
    )
    report = train_pair(
        options.output,
        target_steps=options.target_steps,
        draft_steps=options.draft_steps,
        seed=options.seed,
        compile=not options.eager,
        command=command,
    )
    logger.info("%s", report)


def _demo_grow(options: argparse.Namespace) -> None:
    size = GrownSize(
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_layers=options.num_layers,
    )
    source = bundled.resolve(options.source)
    num_parameters = grow_to_folder(source, options.output, size, seed=options.seed)
    logger.info("%s: %.1fM parameters", options.output, num_parameters / 1e6)


# Imported where they are used: `app` needs Ray, `engine` and `exact` run where there is none.


def _bench(options: argparse.Namespace) -> None:
    subjects = {
        "app": _bench_app,
        "traffic": _bench_traffic,
        "engine": _bench_engine,
        "exact": _bench_exact,
        "compare": _bench_compare,
    }
    logger.info("%s", subjects[options.subject](options))


def _bench_app(options: argparse.Namespace) -> str:
    from cluster.bench.run import format_tables, run_bench

    return format_tables(run_bench(_app_options(options)))


def _bench_traffic(options: argparse.Namespace) -> str:
    from cluster.bench.run import run_traffic
    from cluster.bench.traffic import format_table

    return format_table(run_traffic(_app_options(options)))


def _app_options(options: argparse.Namespace) -> "BenchOptions":
    from cluster.bench.run import BenchOptions

    return BenchOptions(
        target=options.target,
        draft=options.draft,
        gammas=tuple(options.gammas),
        concurrencies=tuple(options.concurrencies),
        texts=tuple(options.texts),
        temperatures=tuple(options.temperatures),
        num_prompts=options.num_prompts,
        max_tokens=options.max_tokens,
        repeats=options.repeats or 3,
        with_baselines=options.baselines,
        with_compile=options.compile,
        output=options.output,
    )


def _bench_engine(options: argparse.Namespace) -> str:
    from cluster.bench.engine import EngineOptions, format_table, run_engine_bench

    rows = run_engine_bench(
        EngineOptions(
            target=options.target,
            draft=options.draft,
            repeats=options.repeats or 20,
            num_threads=options.num_threads,
            with_compile=options.compile,
            output=options.output,
        )
    )
    return format_table(rows)


def _bench_exact(options: argparse.Namespace) -> str:
    from cluster.bench.exactness import ExactnessOptions, format_table, run_exactness

    rows = run_exactness(
        ExactnessOptions(
            target=options.target,
            draft=options.draft,
            num_prompts=options.num_prompts,
            max_tokens=options.max_tokens,
            with_compile=options.compile,
            output=options.output,
        )
    )
    return format_table(rows)


def _bench_compare(options: argparse.Namespace) -> str:
    if len(options.reports) != 2:
        raise ConfigError(f"compare takes two reports, not {len(options.reports)}")
    return format_comparison(compare(*options.reports))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
