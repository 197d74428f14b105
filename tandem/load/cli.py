"""`tandem load <subject>`: what an app is put under."""

from typing import Any

from tandem.subjects import add_subjects

SUBJECTS = {
    "flood": "a key that floods an app, and what another key notices of it",
    "cancels": "clients that leave at random moments, and how soon nothing of theirs is held",
}


def add_load(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    add_subjects(commands, "load", SUBJECTS, help="put an app under a flood, or let clients leave")
