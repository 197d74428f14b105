"""Tables of the docs that are made of docs/results: of each setting the newest figures."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from tandem.bench.rows import AUTO, DYNAMIC, paired_ratios, with_spread

RESULTS = Path(__file__).parent.parent / "docs" / "results"
TEXTS = {
    "easy": "unseen code",
    "hard": "random characters",
    "copy": "repeated code",
    "repeat": "the same code behind numbers that differ",
    "edit": "a text that the client has, one word in twelve edited",
}
TEXTS_OF_DRAFTERS = ("copy", "repeat", "edit", "easy")
CHAIN = {"drafter": "prompt_lookup,suffix,model"}
OTHER_TOKENIZER = {"drafter": "model", "draft": "other-tokenizer"}
DRAFTERS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "`prompt_lookup`": ("prompt_lookup", CHAIN),
    "`suffix`": ("suffix", CHAIN),
    "`model`": ("model", CHAIN),
    "`predicted`": ("predicted", CHAIN),
    "all of these, `prompt_lookup,suffix,model`": (AUTO, CHAIN),
    "`model` with a tokenizer of its own, `intersection`": (
        AUTO,
        {**OTHER_TOKENIZER, "heterogeneous_vocab": "intersection"},
    ),
    "the same, `retokenize`": (AUTO, {**OTHER_TOKENIZER, "heterogeneous_vocab": "retokenize"}),
    "`early_exit`, first layer of a target trained for it": (
        AUTO,
        {"drafter": "early_exit", "target": "early-exit-grown"},
    ),
}
"""What drafts, in words: the mode of its requests and the options of its app."""
DEFAULT_OPTIONS = {
    "target": None,
    "draft": "tandem-demo-draft",
    "drafter": "model",
    "heterogeneous_vocab": "auto",
}

Rows = list[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The rows of one run of `tandem bench app`, of one text, temperature and number of streams."""

    result: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]

    @cached_property
    def plain(self) -> Mapping[str, Any]:
        return next(row for row in self.rows if row["setting"]["gamma"] == 0)

    @cached_property
    def best_fixed(self) -> Mapping[str, Any]:
        fixed = [row for row in self.rows if row["setting"]["gamma"] != DYNAMIC]
        return max(fixed, key=lambda row: float(row["tokens_per_s"]))

    def dynamic(self, mode: str = AUTO) -> Mapping[str, Any] | None:
        for row in self.rows:
            if (row["setting"]["gamma"], row["setting"].get("mode", AUTO)) == (DYNAMIC, mode):
                return row
        return None

    @property
    def source(self) -> str:
        return _source(self.result)


def _day(result: Mapping[str, Any]) -> str:
    return str(result["date"])[:10]


def _load(result: Mapping[str, Any]) -> str:
    """The day, and the most tokens of a completion."""
    return f"{_day(result)}, {result['options']['max_tokens']}"


def _machine(result: Mapping[str, Any]) -> str:
    hardware = result["hardware"]
    return hardware["gpu"] or f"{hardware['num_cores']} cores of an {hardware['cpu']}"


def _source(result: Mapping[str, Any]) -> str:
    """The day and the machine."""
    return f"on {_day(result)} on {_machine(result)}"


def _results(subject: str) -> Iterator[Mapping[str, Any]]:
    """What `tandem bench` has found about a subject."""
    for path in RESULTS.glob("*.json"):
        for command, result in json.loads(path.read_text()).items():
            if command.startswith(f"tandem bench {subject}"):
                yield result


def _measurements(
    options: Mapping[str, str], *, text: str, temperature: float, streams: int
) -> Iterator[Measurement]:
    """What was measured with these options of the app, in no order."""
    wanted = {**DEFAULT_OPTIONS, **options}
    for result in _results("app"):
        own = {**DEFAULT_OPTIONS, **result["options"]}
        if any(own[name] != value for name, value in wanted.items()):
            continue
        place = {"text": text, "temperature": temperature, "concurrency": streams}
        rows = [row for row in result["rows"] if place.items() <= row["setting"].items()]
        if rows:
            yield Measurement(result=result, rows=tuple(rows))


def _newest(measured: Iterable[Measurement]) -> Measurement | None:
    return max(measured, key=lambda each: str(each.result["date"]), default=None)


def gains_of_drafters(*, streams: int) -> tuple[Rows, str]:
    """Lines of (drafter, times plain decoding by text ...), and where they are from."""
    lines, sources = [], set()
    for drafter, (mode, options) in DRAFTERS.items():
        cells = []
        for text in TEXTS_OF_DRAFTERS:
            found = _newest(_measurements(options, text=text, temperature=0.0, streams=streams))
            row = found and found.dynamic(mode)
            cells.append(f"{with_spread(row['speedups'])}, {row['tau']:.1f}" if row else "")
            if found and row:
                sources.add(found.source)
        lines.append((drafter, *cells))
    return lines, " and ".join(sorted(sources))


def gains_of_dynamic() -> tuple[Rows, str]:
    """Lines of (text, streams, tokens/s plain, best fixed and dynamic, ratios, days and tokens of a
    completion), and the machines.

    Of runs that compared at least two fixed lengths.
    """
    lines, machines = [], set()
    for text in ("easy", "hard", "copy"):
        for streams in (1, 8, 32):
            greedy, sampled = _comparison(text, streams, 0.0), _comparison(text, streams, 0.8)
            if greedy is not None:
                lines.append((f"{TEXTS[text]}, {streams}", *_compared(greedy, sampled)))
                machines |= {_machine(each.result) for each in (greedy, sampled) if each}
    return lines, f"on {' and '.join(sorted(machines))}"


def _comparison(text: str, streams: int, temperature: float) -> Measurement | None:
    """The newest run of default drafters with at least two fixed lengths and a dynamic one."""
    measured = _measurements({}, text=text, temperature=temperature, streams=streams)
    return _newest(each for each in measured if len(each.rows) > 2 and each.dynamic())


def _compared(greedy: Measurement, sampled: Measurement | None) -> tuple[str, ...]:
    """The cells of a line, behind its text and streams."""
    best, dynamic = greedy.best_fixed, greedy.dynamic()
    drawn = sampled and sampled.dynamic()
    assert dynamic is not None
    return (
        f"{greedy.plain['tokens_per_s']:.0f}",
        f"{best['tokens_per_s']:.0f} (gamma {best['setting']['gamma']})",
        f"{dynamic['tokens_per_s']:.0f}",
        with_spread(dynamic["speedups"]),
        with_spread(drawn["speedups"] if drawn else ()),
        "; ".join(dict.fromkeys(_load(each.result) for each in (greedy, sampled) if each)),
    )


def beside_transformers() -> str:
    """A sentence about prompt lookup, of one stream of repeated code."""
    newest = max(_results("lookup"), key=lambda result: str(result["date"]))
    speeds = {way["name"]: way["tokens_per_s"] for way in newest["ways"]}
    alone, theirs, ours = (
        speeds[name]
        for name in ("transformers", "transformers, prompt lookup", "tandem, prompt_lookup")
    )
    times = median(paired_ratios(ours, theirs))
    return (
        f"`generate` {median(alone):.1f} tokens/s, with its prompt lookup {median(theirs):.1f}; "
        f"Tandem with `drafter=prompt_lookup` {median(ours):.1f}, {times:.2f} times that by "
        f"repeat ({_source(newest)}).\n"
    )
