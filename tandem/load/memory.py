"""The memory of an app's processes over time: whether it grows."""

import asyncio
import statistics
from collections import defaultdict

import psutil

PERIOD_S = 2.0


class MemoryWatch:
    """Reads the resident memory of all descendants of a process, by what they are."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._seen: dict[str, list[int]] = defaultdict(list)

    async def watch(self) -> None:
        """Read for ever."""
        while True:
            self.read()
            await asyncio.sleep(PERIOD_S)

    def read(self) -> None:
        for child in self._process.children(recursive=True):
            try:
                name = _kind(child)
                if name is not None:
                    self._seen[f"{name} ({child.pid})"].append(child.memory_info().rss)
            except psutil.Error:
                continue  # it has ended meanwhile

    def growth(self) -> dict[str, tuple[float, float]]:
        """For each process, MiB in the second and in the last quarter of the time.

        The first is left out: a process that begins to work takes what it needs.
        """
        return {name: _quarters(values) for name, values in self._seen.items() if len(values) >= 8}


def _quarters(values: list[int]) -> tuple[float, float]:
    quarter = len(values) // 4
    early, late = values[quarter : 2 * quarter], values[-quarter:]
    return statistics.median(early) / 2**20, statistics.median(late) / 2**20


def _kind(process: psutil.Process) -> str | None:
    """What a process of Ray's is: `Router`, `TargetGroup`, `ProxyActor`; None for Ray's own."""
    title = (process.cmdline() or [""])[0]
    if not title.startswith("ray::"):
        return None
    return title.removeprefix("ray::").partition(".")[0].rpartition(":")[2]
