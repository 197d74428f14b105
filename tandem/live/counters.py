"""The app's Prometheus counters, as the difference of two readings."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

REPORT_MS = 1000
"""Milliseconds between two reports of the app's processes to Ray."""
# Ray's names: counters end with _total, histograms with _sum and _count. Labels of ours are kept.
_LINE = re.compile(r"^ray_tandem_(\w+?)(?:_total)?(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_PHASE = re.compile(r'\bphase="(\w+)"')


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts by name, without `tandem_`; those of a phase as `name:phase`."""

    values: dict[str, float]

    def since(self, earlier: "Counters") -> "Counters":
        """The counts since an earlier reading."""
        return Counters({k: v - earlier.values.get(k, 0.0) for k, v in self.values.items()})

    def __getitem__(self, name: str) -> float:
        """The count, 0 where nothing was counted yet."""
        return self.values.get(name, 0.0)

    def mean_s(self, phase: str) -> float | None:
        """Mean seconds of a phase of the rounds; None where there were no rounds."""
        num_rounds = self[f"round_phase_seconds_count:{phase}"]
        return self[f"round_phase_seconds_sum:{phase}"] / num_rounds if num_rounds else None


def read_counters(urls: Sequence[str]) -> Counters:
    """The sums over all processes of all nodes."""
    return parse_counters("\n".join(httpx.get(url).text for url in urls))


def parse_counters(text: str) -> Counters:
    """The counts that a text of Prometheus' format has."""
    values: dict[str, float] = {}
    for name, labels, value in _LINE.findall(text):
        phase = _PHASE.search(labels)
        key = f"{name}:{phase[1]}" if phase else name
        values[key] = values.get(key, 0.0) + float(value)
    return Counters(values)
