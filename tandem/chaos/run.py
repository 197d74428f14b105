"""Concurrent seeded streams while processes are struck; each text against its undisturbed one."""

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import httpx

from tandem.chaos.events import WORKER_OF, Blow, Event, Struck, Victim, draw_events
from tandem.chaos.outage import Outage
from tandem.chaos.poison import Poison, send_poison
from tandem.chaos.report import ChaosReport
from tandem.chaos.restarts import Restarts
from tandem.live.client import (
    Answer,
    BrokenOffError,
    Endpoint,
    Load,
    LoadError,
    answer,
    cancel_all,
    http_client,
    run_closed,
)

logger = logging.getLogger(__name__)

POLL_S = 0.5
RESEND_AFTER_S = 0.5
REST_TIMEOUT_S = 90.0
"""Longer than the minute after which workers forget what nobody has asked for."""


class Processes(Protocol):
    """The processes of the app under test; every call may block for some seconds."""

    def strike(self, event: Event, *, rng: random.Random) -> Struck | None: ...

    def is_stopped(self, struck: Struck) -> bool: ...

    def resume(self, struck: Struck) -> bool: ...

    def replica(self, worker: str) -> str | None: ...

    def held(self) -> int | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    num_requests: int
    """The least number of requests; they go on until all events are over and each poison was
    sent."""
    num_events: int
    mean_pause_s: float
    """Mean seconds between two events."""
    concurrency: int
    kinds: tuple[Event, ...]
    poisons: tuple[Poison, ...] = ()
    poison_pause_s: float = 1.0
    """Seconds between an answer to poison and the next poison."""
    stop_s: float = 10.0
    """Seconds for which a process is stopped that is to go on."""
    watchdog_s: float = 180.0
    """Seconds that watchdogs may take to end a process that is not to go on."""
    proxy_s: float = 300.0
    """Seconds after a proxy's death for which requests that found no proxy are sent again."""
    seed: int = 0
    """The same seed draws the same events, in the same order."""


async def run_chaos(
    endpoint: Endpoint, load: Load, processes: Processes, options: ChaosOptions
) -> ChaosReport:
    """Send the load's prompts again and again, and strike meanwhile."""
    undisturbed = (await run_closed(endpoint, load, concurrency=options.concurrency)).texts
    run = _Run(endpoint, load, undisturbed, processes, options)
    started = time.perf_counter()
    async with http_client(endpoint) as client:
        striking = asyncio.create_task(run.strike_all())
        poisoning = asyncio.create_task(run.send_poison(client))
        workers = sorted({*WORKER_OF.values()})
        watching = [asyncio.create_task(run.watch_restarts(worker)) for worker in workers]

        def is_over() -> bool:
            return striking.done() and (run.has_sent_each_poison or poisoning.done())

        indices = _indices(len(load.prompts), options.num_requests, is_over)
        try:
            sending = [run.send_all(client, indices) for _ in range(options.concurrency)]
            await asyncio.gather(*sending, striking)
            if poisoning.done():
                poisoning.result()  # raises what has ended it
        finally:
            await cancel_all([striking, poisoning, *watching])
    run.report.restarts_s = run.restarts.seconds
    run.report.elapsed_s = time.perf_counter() - started
    run.report.held = await _held_at_rest(processes)
    return run.report


class _Run:
    """All that a run does at a time, and the report that it fills."""

    def __init__(
        self,
        endpoint: Endpoint,
        load: Load,
        undisturbed: Sequence[str],
        processes: Processes,
        options: ChaosOptions,
    ) -> None:
        self.report = ChaosReport()
        self.restarts = Restarts()
        self.has_sent_each_poison = not options.poisons
        self._endpoint = endpoint
        self._load = load
        self._undisturbed = undisturbed
        self._processes = processes
        self._options = options
        self._outage = Outage(options.proxy_s)

    async def send_all(self, client: httpx.AsyncClient, indices: Iterator[int]) -> None:
        for index in indices:
            self.report.num_requests += 1
            try:
                text = await self._send_until_answered(client, index)
            except LoadError as error:
                logger.warning("lost: %s", error)
                self.report.lost.append(str(error))
                continue
            if text != self._undisturbed[index]:
                self.report.wrong.append(text)

    async def _send_until_answered(self, client: httpx.AsyncClient, index: int) -> str:
        """The text; a request that a proxy took with it is sent again, as its client would do."""
        first_s = time.perf_counter()
        is_resent = False
        while True:
            sent_s = time.perf_counter()
            try:
                got = await answer(client, self._endpoint, self._load, index)
            except BrokenOffError:
                if not self._outage.explains(sent_s=sent_s, now_s=time.perf_counter()):
                    raise
                is_resent = True
                await asyncio.sleep(RESEND_AFTER_S)
                continue
            self._outage.answered(sent_s=sent_s, now_s=got.ended_s)
            report = self.report
            report.num_resent += is_resent
            if is_resent:
                report.longest_resent_s = max(report.longest_resent_s, got.ended_s - first_s)
            else:
                report.longest_stall_s = max(report.longest_stall_s, _longest_silence(got))
            return got.text

    async def send_poison(self, client: httpx.AsyncClient) -> None:
        """Send each kind of poison, one after the other, for ever."""
        while self._options.poisons:
            for poison in self._options.poisons:
                await self._send_one(client, poison)
                await asyncio.sleep(self._options.poison_pause_s)
            self.has_sent_each_poison = True

    async def _send_one(self, client: httpx.AsyncClient, poison: Poison) -> None:
        sent_s = time.perf_counter()
        self.report.num_poison += 1
        try:
            got = await send_poison(client, poison)
        except httpx.TransportError as error:
            if self._outage.explains(sent_s=sent_s, now_s=time.perf_counter()):
                return
            failure = f"{poison.name}: {error!r}"
        else:
            if got.is_right:
                return
            failure = f"{poison.name}: {got.status} {got.text[:300]}"
        logger.warning("poison: %s", failure)
        self.report.poison_failures.append(failure)

    async def watch_restarts(self, worker: str) -> None:
        """Ask who answers, for ever."""
        while True:
            replica = await asyncio.to_thread(self._processes.replica, worker)
            if replica is not None:
                self.restarts.answered(worker, replica, time.perf_counter())
            await asyncio.sleep(POLL_S)

    async def strike_all(self) -> None:
        """All events, and what has been stopped goes on, or is ended, before this returns.

        Those that find nobody get another turn.
        """
        rng = random.Random(self._options.seed)
        waiting = draw_events(self._options.kinds, self._options.num_events, rng)
        stopped: list[asyncio.Task[None]] = []
        try:
            while waiting:
                await asyncio.sleep(rng.uniform(0.5, 1.5) * self._options.mean_pause_s)
                event = waiting.pop(0)
                struck = await self._strike(event, rng)
                if struck is None:
                    waiting.append(event)
                    continue
                self.report.events[event] += 1
                logger.info("%s (%d left)", event, len(waiting))
                if event.blow is not Blow.KILL:
                    stopped.append(asyncio.create_task(self._resume_later(struck)))
            await asyncio.gather(*stopped)
        finally:
            await cancel_all(stopped)

    async def _strike(self, event: Event, rng: random.Random) -> Struck | None:
        is_proxy = event.victim is Victim.PROXY
        with self._outage.striking() if is_proxy else nullcontext():
            struck = await asyncio.to_thread(self._processes.strike, event, rng=rng)
        if struck is not None:
            now_s = time.perf_counter()
            if is_proxy:
                self._outage.begin(now_s)
            else:
                self.restarts.lost(WORKER_OF[event.victim], event.blow, now_s)
        return struck

    async def _resume_later(self, struck: Struck) -> None:
        """Let what was stopped go on after its time, also what watchdogs should have ended by
        then."""
        is_left = struck.event.blow is Blow.HANG
        wait_s = self._options.watchdog_s if is_left else self._options.stop_s
        until_s = time.perf_counter() + wait_s
        try:
            while time.perf_counter() < until_s and self._processes.is_stopped(struck):
                await asyncio.sleep(min(POLL_S, wait_s))
        finally:
            if self._processes.resume(struck) and is_left:
                logger.warning("%s: no watchdog within %.0f s", struck.event, wait_s)
                self.report.num_unnoticed += 1


def _indices(num_prompts: int, num_requests: int, is_over: Callable[[], bool]) -> Iterator[int]:
    """The index of each request's prompt, shared by all who send."""
    for number in itertools.count():
        if number >= num_requests and is_over():
            return
        yield number % num_prompts


def _longest_silence(got: Answer) -> float:
    times = [got.started_s, *got.chunks_s, got.ended_s]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


async def _held_at_rest(processes: Processes) -> int | None:
    """The number of sequences still held once requests have had their time to be forgotten."""
    until = time.perf_counter() + REST_TIMEOUT_S
    while (held := await asyncio.to_thread(processes.held)) != 0 and time.perf_counter() < until:
        await asyncio.sleep(POLL_S)
    return held
