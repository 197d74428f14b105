"""`tandem demo-...`: how the bundled pair and its relatives are made.

What runs a command is imported when it runs, since torch and transformers take seconds.
"""

import argparse
import logging
from pathlib import Path
from typing import Any

from cluster import bundled
from tandem.arguments import whole

logger = logging.getLogger(__name__)

GROWN_SIZES = ("hidden_size", "intermediate_size", "num_layers")
"""The fields of `GrownSize` that are options."""


def add_demo(commands: Any) -> None:
    """Add the commands to argparse's subparsers, whose type is private."""
    train = commands.add_parser("demo-train", help="train the bundled model pair from nothing")
    train.add_argument("--target-steps", type=int, default=3000)
    train.add_argument("--draft-steps", type=int, default=5000)
    _add_training_options(train)
    train.set_defaults(run=_demo_train)

    early = commands.add_parser(
        "demo-early-exit", help="train the bundled target to draft by its own first layer"
    )
    early.add_argument("--early-exit-layer", type=whole, default=1, help="the layer that drafts")
    early.add_argument("--steps", type=whole, default=600)
    _add_training_options(early)
    early.set_defaults(run=_demo_early_exit)

    grow = commands.add_parser("demo-grow", help="grow a model without changing its function")
    grow.add_argument("--source", default=bundled.TARGET_NAME, help="a Llama to grow")
    _add_output_and_seed(grow)
    for name in GROWN_SIZES:
        grow.add_argument(f"--{name.replace('_', '-')}", type=int, default=argparse.SUPPRESS)
    grow.set_defaults(run=_demo_grow)

    other = commands.add_parser(
        "demo-retokenize", help="give the bundled draft another tokenizer, to try such drafts"
    )
    other.add_argument("--permute", action="store_true", help="the same tokens with other ids")
    other.add_argument("--vocab-size", type=int, default=3000, help="tokens of a new tokenizer")
    other.add_argument("--steps", type=int, default=1000, help="of training with a new tokenizer")
    _add_training_options(other)
    other.set_defaults(run=_demo_retokenize)


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    _add_output_and_seed(parser)
    parser.add_argument("--eager", action="store_true", help="do not compile the training step")


def _add_output_and_seed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)


def _demo_train(options: argparse.Namespace) -> None:
    from tandem.demo.pair import train_pair

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
    from tandem.demo.early_exit import train_early_exit

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
    from tandem.demo.retokenize import retokenize_draft

    retokenize_draft(
        options.output,
        vocab_size=None if options.permute else options.vocab_size,
        num_steps=options.steps,
        seed=options.seed,
        compile=not options.eager,
    )


def _demo_grow(options: argparse.Namespace) -> None:
    from tandem.demo.grow import GrownSize, grow_to_folder

    size = GrownSize(**{name: getattr(options, name) for name in GROWN_SIZES if name in options})
    source = bundled.resolve(options.source)
    num_parameters = grow_to_folder(source, options.output, size, seed=options.seed)
    logger.info("%s: %.1fM parameters", options.output, num_parameters / 1e6)
