"""`tandem load <subject>`: what an app is put under."""

from collections.abc import Sequence
from typing import Any

from tandem.subjects import add_subjects

SUBJECTS = {
    "flood": "a key that floods an app, and what another key notices of it",
    "cancels": "clients that leave at random moments, and how soon nothing of theirs is held",
}


def add_load(commands: Any, arguments: Sequence[str]) -> None:
    """Add the command to argparse's subparsers, and the options of the subject that is named."""
    add_subjects(
        commands,
        "load",
        SUBJECTS,
        arguments=arguments,
        help="put an app under a flood, or let clients leave",
    )
