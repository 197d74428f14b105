"""A quiet key's first tokens, alone and beside a flood; memory meanwhile; clients that leave."""

import asyncio
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context

import psutil

from tandem.live.client import Endpoint, Load, LoadError, answer, cancel_all, http_client
from tandem.live.server import LiveServer
from tandem.load.cancels import cancel_grpc, cancel_http
from tandem.load.flood import FloodOptions, FloodReport, run_flood
from tandem.load.memory import MemoryWatch

PAUSE_S = 0.2
"""Between the quiet key's requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    quiet_key: str
    flood_key: str
    flood: FloodOptions
    num_alone: int
    num_cancels: int
    """Over HTTP, and as many over gRPC."""
    num_at_once: int


@dataclass(slots=True, kw_only=True)
class Quiet:
    """What the quiet key saw; times in seconds."""

    first_tokens_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    alone: Quiet
    beside: Quiet
    flood: FloodReport
    growth: dict[str, tuple[float, float]]
    """MiB of each process, early and late."""
    http_cancels_s: list[float]
    grpc_cancels_s: list[float]
    held: dict[str, int]
    """What is held at the end; empty if nothing."""


def run_load(server: LiveServer, load: Load, options: LoadOptions) -> LoadReport:
    """Everything, one after the other."""
    quiet = replace(server.endpoint, api_key=options.quiet_key)
    loud = replace(server.endpoint, api_key=options.flood_key)
    expected = asyncio.run(_texts(quiet, load))
    alone, beside = Quiet(), Quiet()
    asyncio.run(_ask(quiet, load, expected, alone, num=options.num_alone))
    memory = MemoryWatch(psutil.Process(server.pid))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        future = pool.submit(run_flood, loud, load, expected, options.flood)

        async def watch() -> FloodReport:
            watching = asyncio.create_task(memory.watch())
            asking = asyncio.create_task(_ask(quiet, load, expected, beside))
            try:
                return await asyncio.wrap_future(future)
            finally:
                await cancel_all([watching, asking])

        flood = asyncio.run(watch())
    server.wait_until_idle()
    num, at_once = options.num_cancels, options.num_at_once
    held = server.held
    address = server.grpc_address
    return LoadReport(
        alone=alone,
        beside=beside,
        flood=flood,
        growth=memory.growth(),
        http_cancels_s=asyncio.run(cancel_http(loud, load, num, at_once, held)),
        grpc_cancels_s=asyncio.run(cancel_grpc(address, loud, load, num, at_once, held)),
        held=held(),
    )


async def _texts(endpoint: Endpoint, load: Load) -> list[str]:
    """The text of each prompt, one after the other; raises LoadError."""
    async with http_client(endpoint) as client:
        return [
            (await answer(client, endpoint, load, index)).text for index in range(len(load.prompts))
        ]


async def _ask(
    endpoint: Endpoint, load: Load, expected: Sequence[str], quiet: Quiet, num: int | None = None
) -> None:
    """Ask so often, or for ever; under another salt, so that no prompt is cached."""
    async with http_client(endpoint) as client:
        number = 0
        while num is None or number < num:
            index = number % len(load.prompts)
            number += 1
            if index == 0:
                load = load.again()
            try:
                got = await answer(client, endpoint, load, index)
            except LoadError as error:
                quiet.errors.append(str(error))
                continue
            if got.text != expected[index]:
                quiet.wrong.append(got.text)
            quiet.first_tokens_s.append(got.chunks_s[0] - got.started_s)
            await asyncio.sleep(PAUSE_S)


def format_report(report: LoadReport) -> str:
    """What a person reads."""
    alone, beside, flood = report.alone, report.beside, report.flood
    rows = [
        ("quiet key alone, first token", _times(alone.first_tokens_s)),
        ("quiet key beside the flood, first token", _times(beside.first_tokens_s)),
        ("quiet key: wrong texts, errors", f"{len(beside.wrong)}, {len(beside.errors)}"),
        ("flood: right, left, wrong", f"{flood.num_right}, {flood.num_left}, {len(flood.wrong)}"),
        ("flood: errors", f"{len(flood.errors)} {flood.errors[:2]}"),
        ("flood: 429s", f"{len(flood.refusals_s)}, {_times(flood.refusals_s)}"),
        ("nothing held after HTTP clients left", _times(report.http_cancels_s)),
        ("nothing held after gRPC clients left", _times(report.grpc_cancels_s)),
        ("held at the end", str(report.held or "nothing")),
        *((f"MiB of {name}", f"{a:.0f} -> {b:.0f}") for name, (a, b) in report.growth.items()),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _times(seconds: Sequence[float]) -> str:
    """Median, 95th percentile and greatest of some seconds, in ms."""
    if not seconds:
        return "none"
    ordered = sorted(seconds)
    p95 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]
    middle = statistics.median(ordered)
    return f"median {middle * 1e3:.0f} ms, p95 {p95 * 1e3:.0f} ms, most {ordered[-1] * 1e3:.0f} ms"
