"""What a process of its own asks beside the flood: the quiet key, and one that is refused.

Beside them nothing else runs on its event loop, so it holds nothing up that is measured here.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.live.client import Endpoint, Load, LoadError, RefusedError, answer, http_client

PAUSE_S = 0.2
"""Seconds between the requests of one client."""


@dataclass(slots=True, kw_only=True)
class Quiet:
    """What the quiet key saw; times in seconds."""

    first_tokens_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


async def ask_quietly(
    endpoint: Endpoint, load: Load, expected: Sequence[str], quiet: Quiet, num: int | None = None
) -> None:
    """Ask for one completion after the other, so many or for ever; none of them is cached."""
    async with http_client(endpoint) as client:
        number = 0
        while num is None or number < num:
            index = number % len(load.prompts)
            number += 1
            try:
                got = await answer(client, endpoint, load.again(), index)
            except LoadError as error:
                quiet.errors.append(str(error))
            else:
                if got.text != expected[index]:
                    quiet.wrong.append(got.text)
                quiet.first_tokens_s.append(got.chunks_s[0] - got.started_s)
            await asyncio.sleep(PAUSE_S)


async def ask_too_much(endpoint: Endpoint, load: Load, refusals_s: list[float]) -> None:
    """Ask with a key of which one request is let in, for ever; notes how long each 429 took.

    That is from the request to the whole answer, as a client sees it who sends one at a time over
    a connection that it keeps.
    """
    async with http_client(endpoint) as client:
        number = 0
        while True:
            number += 1
            sent_s = time.perf_counter()
            try:
                await answer(client, endpoint, load.again(), number % len(load.prompts))
            except RefusedError:
                refusals_s.append(time.perf_counter() - sent_s)
            await asyncio.sleep(PAUSE_S)
