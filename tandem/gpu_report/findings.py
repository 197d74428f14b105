"""What a step of the report has found so far, and how much of its time is left."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""A line of a table, by column."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """Tables and sentences of one step."""

    tables: dict[str, list[Row]] = field(default_factory=dict)
    """Rows by the table's title."""
    notes: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    """What there was no time for, or is not to be had here."""


class Notebook:
    """Takes findings down, and writes all of them to a file each time.

    A step may be cut at any moment: what stands in the file then is what it has found.
    """

    def __init__(self, path: Path, *, time_s: float, clock: Callable[[], float]) -> None:
        """Start without findings; `time_s` is how long the step may take from now on."""
        self._path = path
        self._clock = clock
        self._ends_at = clock() + time_s
        self.findings = Findings()

    @property
    def left_s(self) -> float:
        """Seconds that the step has left."""
        return self._ends_at - self._clock()

    def has_time(self, thing: str, *, needs_s: float = 0.0) -> bool:
        """Whether there is time for a thing; if not, it is noted as not run."""
        if self.left_s > needs_s:
            return True
        self.skip(thing)
        return False

    def skip(self, thing: str) -> None:
        """Note that a thing was not run."""
        self.findings.not_run.append(thing)
        self._write()

    def add(self, table: str, row: Row) -> None:
        """Add a line to a table."""
        self.findings.tables.setdefault(table, []).append(row)
        self._write()

    def note(self, sentence: str) -> None:
        self.findings.notes.append(sentence)
        self._write()

    def _write(self) -> None:
        self._path.write_text(json.dumps(asdict(self.findings)))


def read_findings(path: Path) -> Findings:
    """What a step has written; nothing where it has not come to write."""
    if not path.exists():
        return Findings()
    return Findings(**json.loads(path.read_text()))
