"""The key that floods: many streams, some hang up, some read slowly. A process of its own.

So what others measure is not held up by the reading of the flood's streams.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from tandem.live.client import (
    Endpoint,
    Load,
    RefusedError,
    http_client,
    stream,
)

MAX_PAUSE_S = 1.0
"""How long a refused stream waits at most: a flood does not do as it is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """How a key floods."""

    num_streams: int
    duration_s: float
    hang_up_share: float
    """The share of the streams that are left before their end."""
    slow_share: float
    """The share of the streams that wait after each event."""
    slow_s: float = 0.05
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class FloodReport:
    """What became of the flood's requests; times in seconds."""

    num_right: int = 0
    num_left: int = 0
    """Streams that the client left."""
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    first_tokens_s: list[float] = field(default_factory=list)
    refusals_s: list[float] = field(default_factory=list)
    """How long each 429 took, beside the reading of all streams."""


def run_flood(
    endpoint: Endpoint, load: Load, expected: Sequence[str], streams: Streams
) -> FloodReport:
    """Flood an app for a while; `expected` are the texts of the load's prompts."""
    return asyncio.run(_flood(endpoint, load, expected, streams))


async def _flood(
    endpoint: Endpoint, load: Load, expected: Sequence[str], streams: Streams
) -> FloodReport:
    report = FloodReport()
    until_s = time.perf_counter() + streams.duration_s

    async with http_client(endpoint) as client:

        async def keep_asking(number: int) -> None:
            rng = random.Random(f"{streams.seed}-{number}")
            while time.perf_counter() < until_s:
                index = rng.randrange(len(load.prompts))
                num_read = rng.randrange(12) if rng.random() < streams.hang_up_share else None
                pause_s = streams.slow_s if rng.random() < streams.slow_share else 0.0
                sent_s = time.perf_counter()
                try:
                    text = await read(index, num_read, pause_s, sent_s)
                except RefusedError as refusal:
                    report.refusals_s.append(time.perf_counter() - sent_s)
                    await asyncio.sleep(min(MAX_PAUSE_S, refusal.retry_after_s))
                    continue
                except Exception as error:  # whatever it is, it is told
                    report.errors.append(repr(error)[:300])
                    continue
                if text is None:
                    report.num_left += 1
                elif text == expected[index]:
                    report.num_right += 1
                else:
                    report.wrong.append(text)

        async def read(
            index: int, num_read: int | None, pause_s: float, sent_s: float
        ) -> str | None:
            """The whole text; None if it was left after so many events."""
            text = ""
            # under a salt of its own: no prompt of the flood is cached
            async with aclosing(stream(client, endpoint, load.again(), index)) as events:
                async for event in events:
                    if num_read is not None and num_read <= 0:
                        return None
                    num_read = None if num_read is None else num_read - 1
                    if event.text and not text:
                        report.first_tokens_s.append(event.at_s - sent_s)
                    text += event.text
                    if pause_s:
                        await asyncio.sleep(pause_s)
            return text

        await asyncio.gather(*[keep_asking(number) for number in range(streams.num_streams)])
    return report
