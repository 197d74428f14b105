"""`tandem bench <subject>`: what can be measured, and what runs it."""

import argparse
import importlib
import logging
from functools import partial
from typing import Any

from tandem.bench.options import add_options, make_options

logger = logging.getLogger(__name__)

DEFAULT_SUBJECT = "app"
# Each is a module with a dataclass `Options` and a function `run`, which returns the tables.
SUBJECTS = {
    "app": "draft lengths in turn on one live app",
    "long-prompt": "what a long prompt does to the streams that run",
    "http-path": "what it costs that each text is a stream of HTTP of its own",
    "traffic": "how gamma=dynamic follows a text that changes",
    "engine": "the workers alone, without Ray",
    "exact": "where 16-bit texts differ from plain decoding, and by how little; without Ray",
}


def add_bench(commands: Any) -> None:
    """Add the command; `commands` is what `add_subparsers` returns, whose type is private."""
    bench = commands.add_parser(
        "bench",
        help="measure a live app, or the workers alone",
        description=f"Without a subject: {DEFAULT_SUBJECT}.",
    )
    subjects = bench.add_subparsers(dest="subject", required=True, metavar="subject")
    for name, text in SUBJECTS.items():
        module = _module(name)
        parser = subjects.add_parser(name, help=text, description=text)
        add_options(parser, module.Options)
        parser.set_defaults(run=partial(_run, module))


def with_default_subject(arguments: list[str]) -> list[str]:
    """The arguments, in which `bench` alone, or with options only, measures an app."""
    if arguments[:1] != ["bench"]:
        return arguments
    has_subject = len(arguments) > 1 and not arguments[1].startswith("-")
    if has_subject or arguments[1:2] in (["-h"], ["--help"]):
        return arguments
    return ["bench", DEFAULT_SUBJECT, *arguments[1:]]


def _module(subject: str) -> Any:
    return importlib.import_module(f"tandem.bench.{subject.replace('-', '_')}")


def _run(module: Any, parsed: argparse.Namespace) -> None:
    logger.info("%s", module.run(make_options(module.Options, parsed)))
