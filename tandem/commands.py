"""The commands that measure, plan and train: their options, and what runs them."""

import argparse
import logging
from collections.abc import Mapping, Sequence

from cluster.version import installed_version
from tandem.bench.cli import add_bench
from tandem.chaos.cli import add_chaos
from tandem.demo.cli import add_demo
from tandem.load.cli import add_load
from tandem.plan import add_plan
from tandem.signals import Stopped, stopped_by_signals
from tandem.subjects import with_default_subject
from workers.errors import TandemError

logger = logging.getLogger(__name__)


def make_parser(others: Mapping[str, str], arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The commands and their options.

    Args:
        others: commands that `tandem` has beside these, and what they do, for its help.
        arguments: what is to be parsed: of subjects, only the one named there has its options.
    """
    parser = argparse.ArgumentParser(prog="tandem")
    parser.add_argument("--version", action="version", version=f"tandem {installed_version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in others.items():
        commands.add_parser(name, help=text)
    add_demo(commands)
    add_bench(commands, arguments)
    add_chaos(commands)
    add_load(commands, arguments)
    add_plan(commands)
    return parser


def run_command(arguments: list[str], *, others: Mapping[str, str]) -> int:
    """Run a command of `make_parser`; returns its exit status.

    A signal ends it in order, with the app that it has started.
    """
    words = with_default_subject(arguments)
    options = make_parser(others, words).parse_args(words)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would write a line per request
    try:
        with stopped_by_signals():
            status: int | None = options.run(options)
    except Stopped as stopped:
        return stopped.status
    except TandemError as error:
        logger.error("%s", error)
        return 1
    return status or 0
