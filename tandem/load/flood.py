"""`tandem load flood`: a quiet key's first tokens, alone and beside a flood, and memory meanwhile.

The flood's key may have as many completions at a time as it has streams. A few streams more than
that are sent, so that some are refused. A third key has no requests left: it is refused each time.
"""

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import psutil

from tandem.arguments import above_zero, share, whole
from tandem.bench.options import command_of, option
from tandem.bench.report import write_result
from tandem.live.client import Endpoint, Load, answer, cancel_all, http_client
from tandem.live.texts import make_prompts
from tandem.load.app import AppOptions, LoadedApp, loaded_app
from tandem.load.memory import MemoryWatch
from tandem.load.quiet import Quiet, ask_quietly, ask_too_much
from tandem.load.report import FloodResult, format_flood
from tandem.load.streams import FloodReport, Streams, run_flood

NUM_PROMPTS = 20
QUIET, FLOOD, SPENT = "quiet", "flood", "spent"
LEAST_PRIORITY = 19
"""The niceness of the flood's process, below that of Ray's workers: the processors are the app's,
as if its clients were elsewhere."""
SPENT_RATE = 1e-4
"""Requests per second: one, and none for hours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(AppOptions):
    """Two keys of one app."""

    streams: int = option(200, "completions that the flood's key may have at a time", type=whole)
    over: int = option(10, "streams that it sends beyond that", type=whole)
    duration_s: float = option(300.0, "seconds of the flood", type=above_zero)
    max_tokens: int = option(48, "tokens of a completion", type=whole)
    hang_ups: float = option(0.2, "the share of the flood's streams that are left", type=share)
    slow: float = option(0.1, "the share of its readers that are slow", type=share)
    alone: int = option(40, "requests of the quiet key before and after the flood", type=whole)
    max_num_seqs: int = option(
        4, "completions that run at a time; a newcomer waits for a step of all", type=whole
    )
    max_queued_requests: int = option(1024, "completions that wait", type=whole)
    max_model_len: int = option(
        512, "tokens; caches this small are full of prompts before their growth counts", type=whole
    )


def run(options: Options) -> str:
    """Run the flood; returns the tables. Raises LoadError where the app answers nothing alone."""
    prompts = make_prompts("easy", NUM_PROMPTS)
    load = Load(prompts=prompts, max_tokens=options.max_tokens, temperature=0.0)
    keys: list[dict[str, Any]] = [
        {"name": QUIET},
        {"name": FLOOD, "max_concurrent": options.streams},
        {"name": SPENT, "requests_per_second": SPENT_RATE},
    ]
    with loaded_app(
        options,
        keys,
        max_num_seqs=options.max_num_seqs,
        max_queued_requests=options.max_queued_requests,
        max_model_len=options.max_model_len,
    ) as app:
        result = run_load(app, load, options)
    tables = format_flood(result)
    figures = {"options": options, "result": result}
    write_result(options.output, command_of("load flood", options), tables, figures)
    return tables


def run_load(app: LoadedApp, load: Load, options: Options) -> FloodResult:
    """The quiet key alone, beside the flood, and alone again."""
    quiet = app.endpoints[QUIET]
    alone, beside, refusals_s = Quiet(), Quiet(), list[float]()
    expected = asyncio.run(_texts(quiet, load))
    asyncio.run(ask_quietly(quiet, load, expected, alone, num=options.alone))
    memory = MemoryWatch(psutil.Process(app.server.pid))
    flood = _beside_flood(app, load, expected, options, memory, beside, refusals_s)
    app.server.wait_until_idle()
    asyncio.run(ask_quietly(quiet, load, expected, alone, num=options.alone))
    return FloodResult(
        alone=alone,
        beside=beside,
        refusals_s=refusals_s,
        flood=flood,
        memory=memory.processes(),
        held=app.server.held(),
    )


def _beside_flood(
    app: LoadedApp,
    load: Load,
    expected: Sequence[str],
    options: Options,
    memory: MemoryWatch,
    quiet: Quiet,
    refusals_s: list[float],
) -> FloodReport:
    """Run the flood in a process of its own; meanwhile others ask here, and note what they see."""
    streams = Streams(
        num_streams=options.streams + options.over,
        duration_s=options.duration_s,
        hang_up_share=options.hang_ups,
        slow_share=options.slow,
    )
    loud = app.endpoints[FLOOD]
    pool = ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=os.nice, initargs=(LEAST_PRIORITY,)
    )
    with pool:
        future = pool.submit(run_flood, loud, load, expected, streams)

        async def ask_until_it_ends() -> FloodReport:
            works = (
                memory.watch(),
                ask_quietly(app.endpoints[QUIET], load, expected, quiet),
                ask_too_much(app.endpoints[SPENT], load, refusals_s),
            )
            tasks = [asyncio.create_task(work) for work in works]
            try:
                report = await asyncio.wrap_future(future)
                for task in tasks:
                    if task.done():
                        task.result()  # raises what has ended it too early
                return report
            finally:
                await cancel_all(tasks)

        return asyncio.run(ask_until_it_ends())


async def _texts(endpoint: Endpoint, load: Load) -> list[str]:
    """The text of each prompt, one after the other; raises LoadError."""
    async with http_client(endpoint) as client:
        return [
            (await answer(client, endpoint, load, index)).text for index in range(len(load.prompts))
        ]
