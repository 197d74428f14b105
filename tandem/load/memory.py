"""The memory of an app's processes over time: whether it grows."""

import asyncio
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

PERIOD_S = 2.0
MOST_GROWTH = 0.05
"""The share by which a process may grow after the first quarter of the time and be called flat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """The resident memory of one process, in MiB.

    Each is the median of an eighth of the time, around that moment.
    """

    name: str
    start: float
    quarter: float
    """The memory after a quarter of the time: a process that has begun to work has what it needs by
    then."""
    middle: float
    end: float

    @property
    def growth(self) -> float:
        """The share by which it has grown since the first quarter of the time."""
        return self.end / self.quarter - 1.0

    @property
    def is_flat(self) -> bool:
        return self.growth <= MOST_GROWTH


class MemoryWatch:
    """Reads the resident memory of all descendants of a process, Ray's own among them."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._names: dict[int, str] = {}
        """The names by process id: what a process is shows once it works, so the newest counts."""
        self._seen: dict[int, list[int]] = {}

    async def watch(self) -> None:
        """Read the memory again and again, for ever."""
        while True:
            await asyncio.to_thread(self.read)
            await asyncio.sleep(PERIOD_S)

    def read(self) -> None:
        for child in self._process.children(recursive=True):
            try:
                name, num_bytes = _name(child), child.memory_info().rss
            except psutil.Error:
                continue  # it has ended meanwhile
            self._names[child.pid] = name
            self._seen.setdefault(child.pid, []).append(num_bytes)

    def processes(self) -> list[ProcessMemory]:
        """The processes that were there all the time, by name, the greatest first."""
        longest = max(map(len, self._seen.values()), default=0)
        lasting = {pid: seen for pid, seen in self._seen.items() if len(seen) == longest}
        found = [make_memory(self._names[pid], seen) for pid, seen in lasting.items()]
        return sorted(found, key=lambda each: -each.end)


def make_memory(name: str, readings: Sequence[int]) -> ProcessMemory:
    """The memory of a process from readings in bytes, at equal intervals."""
    width = max(1, len(readings) // 8)

    def around(moment: float) -> float:
        first = round(moment * (len(readings) - width))
        return statistics.median(readings[first : first + width]) / 2**20

    return ProcessMemory(
        name=name, start=around(0.0), quarter=around(0.25), middle=around(0.5), end=around(1.0)
    )


def numbered(names: Sequence[str]) -> list[str]:
    """The names, with a number where several are the same."""
    counts, seen = Counter(names), Counter[str]()
    told = []
    for name in names:
        seen[name] += 1
        told.append(f"{name} {seen[name]}" if counts[name] > 1 else name)
    return told


def _name(process: psutil.Process) -> str:
    """What a process is: `Router`, `TargetGroup`, `ProxyActor`, or a program of Ray's own."""
    words = process.cmdline() or [""]
    if words[0].startswith("ray::"):
        return words[0].removeprefix("ray::").partition(".")[0].rpartition(":")[2]
    scripts = [word.rpartition("/")[2] for word in words if word.endswith(".py")]
    return scripts[0] if scripts else process.name()
