"""The tables of `tandem load`: what was asked of the app, what was seen, and the figures."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.bench.report import markdown_table, percentiles
from tandem.load.memory import ProcessMemory, numbered
from tandem.load.quiet import Quiet
from tandem.load.streams import FloodReport

MOST_SLOWDOWN = 1.5
"""How many times its lone first token the quiet key's may take beside a flood."""
LONGEST_REFUSAL_S = 0.05
LONGEST_HELD_S = 2.0
MAX_SHOWN = 3
"""Examples of what was wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FloodResult:
    """What the clients saw, and the app's memory meanwhile; times in seconds."""

    alone: Quiet
    beside: Quiet
    refusals_s: list[float]
    """How long each 429 took that a client beside the flood got, by its own clock."""
    flood: FloodReport
    memory: list[ProcessMemory]
    held: dict[str, int]
    """What the app holds at the end; empty if nothing."""

    @property
    def slowdown(self) -> float:
        """The quiet key's median first token beside the flood, over the one alone."""
        beside, alone = self.beside.first_tokens_s, self.alone.first_tokens_s
        return statistics.median(beside) / statistics.median(alone) if beside and alone else 0.0

    @property
    def wrong(self) -> list[str]:
        return [*self.alone.wrong, *self.beside.wrong, *self.flood.wrong]

    @property
    def errors(self) -> list[str]:
        return [*self.alone.errors, *self.beside.errors, *self.flood.errors]


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelResult:
    """Clients of one protocol that left; one number for each time that all had left."""

    protocol: str
    num_clients: int
    num_unanswered: int
    """The clients that left before their first text: in the queue or while their prompt was run."""
    until_free_s: list[float]
    """Seconds until nothing was held any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Demand:
    """Something that is asked of the app."""

    what: str
    asked: str
    seen: str
    is_met: bool


def format_flood(result: FloodResult) -> str:
    """What a person reads of a flood."""
    flood, refusals_s = result.flood, result.refusals_s
    times: list[tuple[str, Sequence[float]]] = [
        ("quiet key alone, first token", result.alone.first_tokens_s),
        ("quiet key beside the flood, first token", result.beside.first_tokens_s),
        ("the flood's own first tokens", flood.first_tokens_s),
        ("429 as a client beside the flood sees it", refusals_s),
        ("429 as the flood's process sees it, which reads all streams", flood.refusals_s),
    ]
    counts = {
        "right": lambda each: str(each.num_right),
        "left by the client": lambda each: str(each.num_left),
        "wrong": lambda each: str(len(each.wrong)),
        "errors": lambda each: str(len(each.errors)),
        "refused": lambda each: str(len(each.refusals_s)),
    }
    faults = [f"wrong: {text!r}" for text in result.wrong[:MAX_SHOWN]]
    faults += [f"error: {text}" for text in result.errors[:MAX_SHOWN]]
    return "\n".join(
        [
            _demands(_demands_of(result)),
            _times(times),
            "The flood's requests:\n",
            markdown_table(counts, [flood]),
            "Resident memory in MiB; growth is from the first quarter of the time on:\n",
            _memory(result.memory),
            *faults,
        ]
    )


def format_cancels(results: Sequence[CancelResult]) -> str:
    """What a person reads of clients that have left."""
    return _demands([_demand_of_cancels(each) for each in results])


def _demand_of_cancels(result: CancelResult) -> _Demand:
    times_s = result.until_free_s
    middle_s, longest_s = statistics.median(times_s), max(times_s)
    return _Demand(
        what=f"{result.num_clients} clients leave over {result.protocol}, "
        f"{result.num_unanswered} of them before their first text: nothing is held",
        asked=f"within {LONGEST_HELD_S:g} s",
        seen=f"{len(times_s)} times, median {middle_s:.3f} s, most {longest_s:.3f} s",
        is_met=longest_s <= LONGEST_HELD_S,
    )


def _demands_of(result: FloodResult) -> list[_Demand]:
    num_right = result.flood.num_right + len(result.beside.first_tokens_s)
    num_faults = len(result.wrong) + len(result.errors)
    grown = [each for each in result.memory if not each.is_flat]
    longest_s = max(result.refusals_s, default=0.0)
    (p95_s,) = percentiles(result.refusals_s, (95,)) or (0.0,)
    return [
        _Demand(
            what="completed texts",
            asked="all right",
            seen=f"{num_right}, {len(result.wrong)} wrong, {len(result.errors)} errors",
            is_met=num_faults == 0 and num_right > 0,
        ),
        _Demand(
            what="the quiet key's first token beside the flood, medians",
            asked=f"at most {MOST_SLOWDOWN:g} times the one alone",
            seen=f"{result.slowdown:.2f} times",
            is_met=0.0 < result.slowdown <= MOST_SLOWDOWN,
        ),
        _Demand(
            what=f"{len(result.refusals_s)} answers 429, from the request to their end",
            asked=f"95 % within {LONGEST_REFUSAL_S * 1e3:.0f} ms",
            seen=f"{p95_s * 1e3:.0f} ms, most {longest_s * 1e3:.0f} ms",
            is_met=0.0 < p95_s <= LONGEST_REFUSAL_S,
        ),
        _Demand(
            what="memory of each process",
            asked="flat",
            seen=", ".join(each.name for each in grown) + " grew" if grown else "flat",
            is_met=bool(result.memory) and not grown,
        ),
        _Demand(
            what="sequences and blocks that are held at the end",
            asked="none",
            seen=", ".join(f"{num} {name}" for name, num in result.held.items()) or "none",
            is_met=not result.held,
        ),
    ]


def _demands(demands: Sequence[_Demand]) -> str:
    columns: dict[str, Callable[[_Demand], str]] = {
        "what": lambda each: each.what,
        "asked": lambda each: each.asked,
        "seen": lambda each: each.seen,
        "met": lambda each: "yes" if each.is_met else "**no**",
    }
    return markdown_table(columns, demands)


def _times(rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    def cell(rank: int) -> Callable[[tuple[str, Sequence[float]]], str]:
        return lambda row: "".join(f"{s * 1e3:.0f}" for s in percentiles(row[1], (rank,)))

    columns: dict[str, Callable[[tuple[str, Sequence[float]]], str]] = {
        "ms": lambda row: row[0],
        "number": lambda row: str(len(row[1])),
        "p50": cell(50),
        "p95": cell(95),
        "most": cell(100),
    }
    return markdown_table(columns, rows)


def _memory(processes: Sequence[ProcessMemory]) -> str:
    names = numbered([each.name for each in processes])
    columns: dict[str, Callable[[tuple[str, ProcessMemory]], str]] = {
        "process": lambda row: row[0],
        "start": lambda row: f"{row[1].start:.0f}",
        "first quarter": lambda row: f"{row[1].quarter:.0f}",
        "middle": lambda row: f"{row[1].middle:.0f}",
        "end": lambda row: f"{row[1].end:.0f}",
        "growth": lambda row: f"{row[1].growth:+.1%}",
    }
    return markdown_table(columns, list(zip(names, processes, strict=True)))
