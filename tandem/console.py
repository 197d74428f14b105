"""What a person reads in the terminal while a server runs."""

import re
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any, TextIO

MAX_HELD_LINES = 400
# Lines of a log: Serve's begin with their level, those of Ray's C++ parts carry a letter.
LOG_LINE = re.compile(r"^(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d{4}-\d\d-\d\d .*? -- ")
NATIVE_LINE = re.compile(r"^\[\d{4}-\d\d-\d\d [\d:,]+ (?P<level>[DIWEFC]) ")
QUIET_LEVELS = frozenset({"DEBUG", "INFO", "D", "I", "W"})
# Warnings of things that are as they should be.
NOISE = re.compile(
    r"taken more than \d+s to initialize|caused by a slow __init__|Loading weights|it/s\]"
    r"|Token authentication is enabled"
    r'|^\{"time": '  # the log of requests
)


class Console:
    """Writes a person's lines to the standard output, errors and workers' lines to the other."""

    def __init__(self, output: TextIO | None = None, errors: TextIO | None = None) -> None:
        self._output = output or sys.stdout
        self._errors = errors or sys.stderr

    def say(self, line: str) -> None:
        self._write(self._output, line)

    def complain(self, line: str) -> None:
        self._write(self._errors, line)

    def _write(self, stream: TextIO, line: str) -> None:
        stream.write(f"{line}\n")
        stream.flush()


class WorkerLog:
    """Shows what Ray's processes write, if it is worth a look: warnings, errors, crashes.

    While a server starts, lines are held: a start that fails is explained in one sentence, and
    what it had written is shown only if there is none.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._held: deque[str] | None = deque(maxlen=MAX_HELD_LINES)
        self._is_quiet = False

    def receive(self, batch: Mapping[str, Any]) -> None:
        """Take lines of one process, as Ray's dispatcher of standard streams has them."""
        if self._is_quiet or batch.get("pid") == "autoscaler":  # its reports every few seconds
            return
        who = _short_name(batch)
        for line in batch.get("lines", ()):
            if is_worth_reading(line):
                self._show(f"{who}: {line}")

    def _show(self, line: str) -> None:
        if self._held is None:
            self._console.complain(line)
        else:
            self._held.append(line)

    def release(self) -> None:
        """Show what is held, and from now on everything at once."""
        held, self._held = self._held or (), None
        for line in held:
            self._console.complain(line)

    def silence(self) -> None:
        """Show nothing more: what processes write that are ended on purpose is no news."""
        self._is_quiet = True
        self._held = None


def is_worth_reading(line: str) -> bool:
    """Whether a line of a worker's output is more than a note or a false alarm."""
    if not line.strip() or NOISE.search(line):
        return False
    match = LOG_LINE.match(line) or NATIVE_LINE.match(line)
    return match is None or match["level"] not in QUIET_LEVELS


def _short_name(batch: Mapping[str, Any]) -> str:
    """Like `TargetGroup` for an actor called ServeReplica:default:TargetGroup."""
    name = batch.get("actor_name") or batch.get("task_name") or batch.get("pid") or "ray"
    return str(name).rpartition(":")[2]
