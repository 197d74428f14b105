"""Clients that leave at random moments, over HTTP and gRPC: how soon nothing of theirs is held."""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import grpc

from deployments.api.tandem_pb2 import GenerateRequest
from deployments.api.tandem_pb2_grpc import GenerationStub
from tandem.live.client import Endpoint, Load, cancel_all, http_client, stream
from workers.errors import TandemError

Held = Callable[[], dict[str, int]]
"""What an app holds for its clients, by name; empty if nothing."""

MAX_STAY_S = 1.0
"""How long a client stays at most: some leave in the queue, some in the prefill, some later."""
POLL_S = 0.02
TIMEOUT_S = 30.0


class HeldError(TandemError):
    """Something is still held of clients that have left long ago."""


async def cancel_http(
    endpoint: Endpoint, load: Load, num: int, num_at_once: int, held: Held
) -> list[float]:
    """Seconds that it took until nothing was held, for each round of `num_at_once` clients."""
    async with http_client(endpoint) as client:

        async def stay(index: int) -> None:
            async with aclosing(stream(client, endpoint, load, index)) as events:
                async for _ in events:
                    pass

        return await _cancel(stay, num, num_at_once, held, len(load.prompts))


async def cancel_grpc(
    address: str,
    endpoint: Endpoint,
    load: Load,
    num: int,
    num_at_once: int,
    held: Held,
) -> list[float]:
    """The same over gRPC."""
    metadata = [("authorization", f"Bearer {endpoint.api_key}")]
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = GenerationStub(channel)  # type: ignore[no-untyped-call]  # generated

        async def stay(index: int) -> None:
            request = GenerateRequest(
                text=str(load.prompts[index]), max_tokens=load.max_tokens, ignore_eos=True
            )
            async for _ in stub.GenerateStream(request, metadata=metadata):
                pass

        return await _cancel(stay, num, num_at_once, held, len(load.prompts))


async def _cancel(
    stay: Callable[[int], Coroutine[Any, Any, None]],
    num: int,
    num_at_once: int,
    held: Held,
    num_prompts: int,
) -> list[float]:
    rng = random.Random(0)
    times_s = []
    for first in range(0, num, num_at_once):
        clients = [
            asyncio.create_task(stay((first + number) % num_prompts))
            for number in range(min(num_at_once, num - first))
        ]
        for client in clients:
            await asyncio.sleep(rng.uniform(0, MAX_STAY_S) / num_at_once)
            if client.done():
                client.result()  # raises what has ended it
        await cancel_all(clients)
        times_s.append(await _until_nothing_is_held(held))
    return times_s


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
