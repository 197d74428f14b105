"""`tandem load cancels`: clients that leave at random moments, over HTTP and gRPC.

Far more ask at a time than may run, and a third of the prompts are long, so some leave in the
queue, some while their prompt is run, and some later.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc

from deployments.api.tandem_pb2 import GenerateRequest
from deployments.api.tandem_pb2_grpc import GenerationStub
from tandem.arguments import above_zero, whole
from tandem.bench.options import command_of, option
from tandem.bench.report import write_result
from tandem.live.client import Endpoint, Load, http_client, stream
from tandem.live.texts import make_long_text, make_prompts
from tandem.load.app import AppOptions, loaded_app
from tandem.load.report import CancelResult, format_cancels
from workers.errors import TandemError

NUM_PROMPTS = 20
MAX_TOKENS = 2000
"""More than a client stays for."""
POLL_S = 0.02
TIMEOUT_S = 30.0
KEY = "leaving"

Held = Callable[[], dict[str, int]]
"""What an app holds for its clients, by name; empty if nothing."""
Texts = Callable[[Load, int], AsyncGenerator[str]]
"""Asks for the completion of a load's prompt, and hands out its pieces."""


class HeldError(TandemError):
    """Something is still held of clients that have left long ago."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(AppOptions):
    """Rounds of clients that all leave."""

    cancels: int = option(200, "clients that leave, over HTTP and as many over gRPC", type=whole)
    at_once: int = option(10, "of them at a time", type=whole)
    stay_s: float = option(1.0, "seconds that a client stays at most", type=above_zero)
    long_prompt: int = option(4000, "characters of a third of the prompts", type=whole)
    max_num_seqs: int = option(4, "completions that run at a time", type=whole)


def run(options: Options) -> str:
    """Let all clients leave; returns the table. Raises HeldError if something stays for good."""
    short = make_prompts("easy", NUM_PROMPTS)
    text = make_long_text(options.long_prompt * NUM_PROMPTS)
    long = [text[i * options.long_prompt :][: options.long_prompt] for i in range(NUM_PROMPTS)]
    prompts = [prompt for pair in zip(short, short[::-1], long, strict=True) for prompt in pair]
    load = Load(prompts=prompts, max_tokens=MAX_TOKENS, temperature=0.0)
    keys = [{"name": KEY}]
    with loaded_app(options, keys, max_num_seqs=options.max_num_seqs) as app:
        endpoint, address = app.endpoints[KEY], app.server.grpc_address
        results = [
            asyncio.run(leave_over_http(endpoint, load, options, app.server.held)),
            asyncio.run(leave_over_grpc(endpoint, address, load, options, app.server.held)),
        ]
    table = format_cancels(results)
    figures = {"options": options, "results": results}
    write_result(options.output, command_of("load cancels", options), table, figures)
    return table


async def leave_over_http(
    endpoint: Endpoint, load: Load, options: Options, held: Held
) -> CancelResult:
    """Clients of HTTP that close their connections."""
    async with http_client(endpoint) as client:

        async def texts(load: Load, index: int) -> AsyncGenerator[str]:
            async with aclosing(stream(client, endpoint, load, index)) as events:
                async for event in events:
                    yield event.text

        return await _leave("HTTP", texts, load, options, held)


async def leave_over_grpc(
    endpoint: Endpoint, address: str, load: Load, options: Options, held: Held
) -> CancelResult:
    """Clients of gRPC that cancel their calls."""
    metadata = [("authorization", f"Bearer {endpoint.api_key}")]
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = GenerationStub(channel)  # type: ignore[no-untyped-call]  # generated

        async def texts(load: Load, index: int) -> AsyncGenerator[str]:
            request = GenerateRequest(
                text=str(load.prompts[index]),
                max_tokens=load.max_tokens,
                ignore_eos=True,
                cache_salt=load.salt,
            )
            async for chunk in stub.GenerateStream(request, metadata=metadata):
                yield chunk.text

        return await _leave("gRPC", texts, load, options, held)


async def _leave(
    protocol: str, texts: Texts, load: Load, options: Options, held: Held
) -> CancelResult:
    """Round after round: so many come, each leaves when it likes, and then nothing may be held."""
    rng = random.Random(0)
    num_unanswered, until_free_s = 0, []

    async def stay(index: int, stay_s: float) -> bool:
        """A client that leaves after `stay_s` seconds; returns whether it got text by then."""
        has_text = False
        try:
            async with asyncio.timeout(stay_s), aclosing(texts(load.again(), index)) as pieces:
                async for piece in pieces:
                    has_text |= bool(piece)
        except TimeoutError:
            pass
        return has_text

    for first in range(0, options.cancels, options.at_once):
        numbers = range(first, min(first + options.at_once, options.cancels))
        answered = await asyncio.gather(
            *(stay(i % len(load.prompts), rng.uniform(0, options.stay_s)) for i in numbers)
        )
        num_unanswered += answered.count(False)
        until_free_s.append(await _until_nothing_is_held(held))
    return CancelResult(
        protocol=protocol,
        num_clients=options.cancels,
        num_unanswered=num_unanswered,
        until_free_s=until_free_s,
    )


async def _until_nothing_is_held(held: Held) -> float:
    """Seconds from now; raises HeldError when it takes too long."""
    began_s = time.perf_counter()
    while still_held := await asyncio.to_thread(held):
        if time.perf_counter() - began_s > TIMEOUT_S:
            raise HeldError(
                f"{TIMEOUT_S:g} s after all clients have left, still held: {still_held}"
            )
        await asyncio.sleep(POLL_S)
    return time.perf_counter() - began_s
