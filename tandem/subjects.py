"""Commands that measure one of several subjects, like `tandem bench app`.

A subject is a module with a dataclass `Options` and a function `run`, which returns what is shown.
"""

import argparse
import importlib
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tandem.bench.options import add_options, make_options

logger = logging.getLogger(__name__)

DEFAULT_SUBJECTS = {"bench": "app", "load": "flood"}
"""What each such command measures where it is not told."""


def add_subjects(
    commands: Any, command: str, subjects: Mapping[str, str], *, arguments: Sequence[str], help: str
) -> None:
    """Add a command; the subjects are modules of `tandem.<command>`, with what they measure.

    Only the one that the arguments name is imported for its options: others would take seconds.
    `commands` is what `add_subparsers` returns, whose type is private.
    """
    description = f"Without a subject: {DEFAULT_SUBJECTS[command]}."
    parser = commands.add_parser(command, help=help, description=description)
    parsers = parser.add_subparsers(dest="subject", required=True, metavar="subject")
    for name, text in subjects.items():
        subject = parsers.add_parser(name, help=text, description=text)
        if list(arguments[:2]) == [command, name]:
            module = importlib.import_module(f"tandem.{command}.{name.replace('-', '_')}")
            add_options(subject, module.Options)
            subject.set_defaults(run=partial(_run, module))


def with_default_subject(arguments: list[str]) -> list[str]:
    """The arguments, in which `bench` alone, or with options only, has its default subject."""
    if not arguments or arguments[0] not in DEFAULT_SUBJECTS:
        return arguments
    command, *others = arguments
    has_subject = bool(others) and not others[0].startswith("-")
    if has_subject or others[:1] in (["-h"], ["--help"]):
        return arguments
    return [command, DEFAULT_SUBJECTS[command], *others]


def _run(module: Any, parsed: argparse.Namespace) -> None:
    logger.info("%s", module.run(make_options(module.Options, parsed)))
