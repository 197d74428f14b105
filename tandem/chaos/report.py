"""What a chaos run has counted."""

import statistics
from collections import Counter
from dataclasses import dataclass, field

from tandem.chaos.events import Event

MAX_SHOWN = 5
"""Examples of what was wrong."""


@dataclass(slots=True, kw_only=True)
class ChaosReport:
    """Counts of a run: its requests, events and poison."""

    num_requests: int = 0
    events: Counter[Event] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    """Errors of requests that did not complete."""
    wrong: list[str] = field(default_factory=list)
    """Texts that differ from the undisturbed ones."""
    num_resent: int = 0
    """Requests that were cut with Serve's proxy, or found none, and were sent again until they were
    answered."""
    longest_stall_s: float = 0.0
    """The longest that a stream said nothing, its first text included; without those resent."""
    longest_resent_s: float = 0.0
    """The longest that a resent request took, from its first sending to its end."""
    num_poison: int = 0
    poison_failures: list[str] = field(default_factory=list)
    """Answers to poison with a status of 500 and more."""
    restarts_s: dict[str, list[float]] = field(default_factory=dict)
    """Seconds from the loss of a worker to the first answer of the one in its place, by kind."""
    num_unnoticed: int = 0
    """Stopped processes that no watchdog has ended in time, so that they were let go on."""
    held: int | None = 0
    """Sequences that are held at the end, though nobody asks for anything; None if not known."""
    elapsed_s: float = 0.0

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.wrong or self.poison_failures) and self.held == 0


def format_report(report: ChaosReport) -> str:
    """A Markdown table, and below it what was wrong."""
    events = sorted(report.events.items(), key=lambda item: str(item[0]))
    rows: list[tuple[str, object]] = [
        ("requests", report.num_requests),
        ("events", report.events.total()),
        *((f"of these: {event}", number) for event, number in events),
        ("lost", len(report.lost)),
        ("wrong", len(report.wrong)),
        ("cut with the proxy and resent, then right", report.num_resent),
        ("poison requests among them", report.num_poison),
        ("of these: answered with 5xx", len(report.poison_failures)),
        ("longest stall", f"{report.longest_stall_s:.1f} s"),
        ("longest of those resent", f"{report.longest_resent_s:.1f} s"),
        *(
            (f"until another {worker} answers, median and longest", _median_and_longest(times))
            for worker, times in sorted(report.restarts_s.items())
        ),
        ("stopped, and noticed by no watchdog", report.num_unnoticed),
        ("held at the end", "not known" if report.held is None else report.held),
        ("time", f"{report.elapsed_s:.0f} s"),
    ]
    lines = [f"| {name} | {value} |" for name, value in rows]
    faults = [f"lost: {error}" for error in report.lost[:MAX_SHOWN]]
    faults += [f"poison: {answer}" for answer in report.poison_failures[:MAX_SHOWN]]
    return "\n".join(["| chaos | |", "| --- | ---: |", *lines, *faults])


def _median_and_longest(times: list[float]) -> str:
    return f"{statistics.median(times):.1f} and {max(times):.1f} s"
