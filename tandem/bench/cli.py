"""`tandem bench <subject>`: what can be measured."""

from collections.abc import Sequence
from typing import Any

from tandem.subjects import add_subjects

SUBJECTS = {
    "app": "draft lengths in turn on one live app",
    "long-prompt": "what a long prompt does to the streams that run",
    "http-path": "what it costs that each text is a stream of HTTP of its own",
    "lookup": "one stream without a draft model, beside transformers' prompt lookup",
    "traffic": "how gamma=dynamic follows a text that changes",
    "engine": "the workers alone, without Ray",
    "exact": "where 16-bit texts differ from plain decoding, and by how little; without Ray",
}


def add_bench(commands: Any, arguments: Sequence[str]) -> None:
    """Add the command to argparse's subparsers, and the options of the subject that is named."""
    add_subjects(
        commands,
        "bench",
        SUBJECTS,
        arguments=arguments,
        help="measure a live app, or the workers alone",
    )
