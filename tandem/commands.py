"""The commands that measure, plan and train: their options, and what runs them."""

import argparse
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster import bundled
from tandem.arguments import whole
from tandem.bench.cli import add_bench
from tandem.chaos.cli import add_chaos
from tandem.demo.early_exit import train_early_exit
from tandem.demo.grow import GrownSize, grow_to_folder
from tandem.demo.pair import train_pair
from tandem.demo.retokenize import retokenize_draft
from tandem.load.cli import add_load
from tandem.plan import add_plan
from tandem.subjects import with_default_subject
from workers.errors import TandemError

logger = logging.getLogger(__name__)

Commands = Any
"""The type that `add_subparsers` returns, which argparse keeps private."""


def make_parser(others: Mapping[str, str]) -> argparse.ArgumentParser:
    """The commands and their options.

    Args:
        others: commands that `tandem` has beside these, and what they do, for its help.
    """
    parser = argparse.ArgumentParser(prog="tandem")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in others.items():
        commands.add_parser(name, help=text)
    _add_demo(commands)
    add_bench(commands)
    add_chaos(commands)
    add_load(commands)
    add_plan(commands)
    return parser


def run_command(arguments: list[str], *, others: Mapping[str, str]) -> int:
    """Run a command of `make_parser`; returns its exit status."""
    options = make_parser(others).parse_args(with_default_subject(arguments))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would write a line per request
    try:
        status: int | None = options.run(options)
    except TandemError as error:
        logger.error("%s", error)
        return 1
    return status or 0


def _add_demo(commands: Commands) -> None:
    train = commands.add_parser("demo-train", help="train the bundled model pair from nothing")
    train.add_argument("--output", type=Path, required=True, help="folder to write the pair to")
    train.add_argument("--target-steps", type=int, default=3000)
    train.add_argument("--draft-steps", type=int, default=5000)
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--eager", action="store_true", help="do not compile the training step")
    train.set_defaults(run=_demo_train)

    early = commands.add_parser(
        "demo-early-exit", help="train the bundled target to draft by its own first layer"
    )
    early.add_argument("--output", type=Path, required=True, help="folder to write to")
    early.add_argument("--early-exit-layer", type=whole, default=1, help="the layer that drafts")
    early.add_argument("--steps", type=whole, default=600)
    early.add_argument("--seed", type=int, default=0)
    early.add_argument("--eager", action="store_true", help="do not compile the training step")
    early.set_defaults(run=_demo_early_exit)

    grow = commands.add_parser("demo-grow", help="grow a model without changing its function")
    grow.add_argument("--source", default=bundled.TARGET_NAME, help="a Llama to grow")
    grow.add_argument("--output", type=Path, required=True, help="folder to write to")
    size = GrownSize()
    grow.add_argument("--hidden-size", type=int, default=size.hidden_size)
    grow.add_argument("--intermediate-size", type=int, default=size.intermediate_size)
    grow.add_argument("--num-layers", type=int, default=size.num_layers)
    grow.add_argument("--seed", type=int, default=0)
    grow.set_defaults(run=_demo_grow)

    other = commands.add_parser(
        "demo-retokenize", help="give the bundled draft another tokenizer, to try such drafts"
    )
    other.add_argument("--output", type=Path, required=True, help="folder to write to")
    other.add_argument("--permute", action="store_true", help="the same tokens with other ids")
    other.add_argument("--vocab-size", type=int, default=3000, help="tokens of a new tokenizer")
    other.add_argument("--steps", type=int, default=1000, help="of training with a new tokenizer")
    other.add_argument("--seed", type=int, default=0)
    other.add_argument("--eager", action="store_true", help="do not compile the training step")
    other.set_defaults(run=_demo_retokenize)


def _demo_train(options: argparse.Namespace) -> None:
    command = (
        f"tandem demo-train --target-steps {options.target_steps} "
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


def _demo_early_exit(options: argparse.Namespace) -> None:
    command = (
        f"tandem demo-early-exit --early-exit-layer {options.early_exit_layer} "
        f"--steps {options.steps} --seed {options.seed}"
    )
    report = train_early_exit(
        options.output,
        early_exit_layer=options.early_exit_layer,
        num_steps=options.steps,
        seed=options.seed,
        compile=not options.eager,
        command=command,
    )
    logger.info("%s", report)


def _demo_retokenize(options: argparse.Namespace) -> None:
    retokenize_draft(
        options.output,
        vocab_size=None if options.permute else options.vocab_size,
        num_steps=options.steps,
        seed=options.seed,
        compile=not options.eager,
    )


def _demo_grow(options: argparse.Namespace) -> None:
    size = GrownSize(
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_layers=options.num_layers,
    )
    source = bundled.resolve(options.source)
    num_parameters = grow_to_folder(source, options.output, size, seed=options.seed)
    logger.info("%s: %.1fM parameters", options.output, num_parameters / 1e6)
