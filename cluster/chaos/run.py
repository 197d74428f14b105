"""Concurrent seeded streams while a killer goes round; each text against its undisturbed one."""

import asyncio
import itertools
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cluster.bench.client import (
    Answer,
    Endpoint,
    Load,
    LoadError,
    answer,
    http_client,
    run_closed,
)
from cluster.chaos.victims import Victim

logger = logging.getLogger(__name__)

Kill = Callable[[Victim], bool]
"""Kills one of a kind; says whether there was one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    num_requests: int
    """At least; they go on until all kills are done."""
    num_kills: int
    mean_pause_s: float
    """Between two kills."""
    concurrency: int
    victims: tuple[Victim, ...] = tuple(Victim)
    seed: int = 0
    """Of whom is killed when."""


@dataclass(slots=True, kw_only=True)
class ChaosReport:
    """What became of the requests."""

    num_requests: int = 0
    kills: Counter[Victim] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    """Errors of requests that did not complete."""
    wrong: list[str] = field(default_factory=list)
    """Texts that differ from the undisturbed ones."""
    longest_stall_s: float = 0.0
    """The longest that a stream said nothing, its first text included."""
    elapsed_s: float = 0.0

    @property
    def is_good(self) -> bool:
        return not self.lost and not self.wrong


async def run_chaos(
    endpoint: Endpoint, load: Load, kill: Kill, options: ChaosOptions
) -> ChaosReport:
    """Send the load's prompts again and again, and kill meanwhile."""
    undisturbed = (await run_closed(endpoint, load, concurrency=options.concurrency)).texts
    report = ChaosReport()
    started = time.perf_counter()
    killing = asyncio.create_task(_kill_all(kill, options, report))
    indices = _indices(len(load.prompts), options.num_requests, killing)
    async with http_client(endpoint) as client:

        async def send() -> None:
            for index in indices:
                report.num_requests += 1
                try:
                    got = await answer(client, endpoint, load, index, started_s=time.perf_counter())
                except LoadError as error:
                    logger.warning("lost: %s", error)
                    report.lost.append(str(error))
                    continue
                report.longest_stall_s = max(report.longest_stall_s, _longest_silence(got))
                if got.text != undisturbed[index]:
                    report.wrong.append(got.text)

        await asyncio.gather(*[send() for _ in range(options.concurrency)], killing)
    report.elapsed_s = time.perf_counter() - started
    return report


def _indices(num_prompts: int, num_requests: int, killing: asyncio.Task[None]) -> Iterator[int]:
    """Which prompt each request has; for all who send together."""
    for number in itertools.count():
        if number >= num_requests and killing.done():
            return
        yield number % num_prompts


async def _kill_all(kill: Kill, options: ChaosOptions, report: ChaosReport) -> None:
    """Each kind of victim as often as the others; those of which none lives get another turn."""
    rng = random.Random(options.seed)
    waiting = [options.victims[i % len(options.victims)] for i in range(options.num_kills)]
    rng.shuffle(waiting)
    while waiting:
        await asyncio.sleep(rng.uniform(0.5, 1.5) * options.mean_pause_s)
        victim = waiting.pop(0)
        if await asyncio.to_thread(kill, victim):
            report.kills[victim] += 1
            logger.info("killed: %s (%d left)", victim, len(waiting))
        else:
            waiting.append(victim)


def _longest_silence(got: Answer) -> float:
    times = [got.started_s, *got.chunks_s, got.ended_s]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def format_report(report: ChaosReport) -> str:
    """As a Markdown table."""
    rows = [
        ("requests", report.num_requests),
        ("kills", report.kills.total()),
        *((f"of these: {victim}", number) for victim, number in sorted(report.kills.items())),
        ("lost", len(report.lost)),
        ("wrong", len(report.wrong)),
        ("longest stall", f"{report.longest_stall_s:.1f} s"),
        ("time", f"{report.elapsed_s:.0f} s"),
    ]
    lines = [f"| {name} | {value} |" for name, value in rows]
    return "\n".join(["| chaos | |", "| --- | ---: |", *lines])
