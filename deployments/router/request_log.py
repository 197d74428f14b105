"""The log of requests: a line of JSON for each that was read, with counts and times, never a text.

| field | meaning |
| --- | --- |
| `time` | when it ended, in UTC |
| `request_id` | the id in `X-Request-Id`, or in gRPC's metadata |
| `id` | the id in the answer, without its prefix; absent if it never began |
| `key` | the name of its API key; absent without keys |
| `outcome` | `finished`, `cancelled` (its client left), `failed`, or `refused` before it began |
| `error` | the class of the error that ended it |
| `num_choices`, `num_prompt_tokens`, `num_completion_tokens` | counts; tokens as in `usage` |
| `alpha`, `tau` | accepted / tested draft tokens, mean tokens of a verification with drafts |
| `queue_s` | from its arrival to its first slot |
| `prefill_s` | from there to its first token |
| `first_token_s` | from its arrival to its first token |
| `decode_s` | from there to its end |
| `total_s` | from its arrival to its end |
"""

import asyncio
import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from deployments.router.generation import Generation, Outcome
from deployments.router.request import Caller, GenerationRequest
from workers.errors import TandemError

LOGGER = "tandem.requests"
MAX_ID_LENGTH = 128
"""Characters of an id that a client chose."""


class RequestLog:
    """Writes the lines to a logger of their own."""

    def __init__(self, write: Callable[[str], None] | None = None) -> None:
        """`write` takes a line in the logger's place."""
        self._write = write or logging.getLogger(LOGGER).info

    def write(
        self,
        request: GenerationRequest,
        caller: Caller,
        generation: Generation | None,
        error: TandemError | None,
        *,
        started: float,
    ) -> None:
        """A request has ended, which came at `started` on the event loop's clock.

        `generation` is None if it never began; `error` is what it was refused with.
        """
        outcome = Outcome.CANCELLED if error is None else Outcome.REFUSED
        if generation is not None:
            outcome, error = generation.outcome, generation.error
        fields = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": caller.request_id[:MAX_ID_LENGTH] or None,
            "id": generation.id if generation is not None else None,
            "key": caller.tenant.name or None,
            "outcome": outcome.value,
            "error": type(error).__name__ if error is not None else None,
            "num_choices": request.num_completions,
            **(_of_generation(generation) if generation is not None else {}),
            "total_s": asyncio.get_running_loop().time() - started,
        }
        self._write(json.dumps({name: _short(v) for name, v in fields.items() if v is not None}))


def _of_generation(generation: Generation) -> dict[str, Any]:
    usage = generation.usage
    counts = usage.speculation
    return {
        "num_prompt_tokens": usage.num_prompt_tokens,
        "num_completion_tokens": usage.num_completion_tokens,
        "alpha": counts.num_accepted / counts.num_tested if counts.num_tested else None,
        "tau": 1 + counts.num_accepted / counts.num_rounds if counts.num_rounds else None,
        **_times(generation),
    }


def _times(generation: Generation) -> dict[str, float | None]:
    """Seconds between what has happened of its first slot, first token and end."""
    times = [completion.times for completion in generation.completions]
    slot = min((t.first_slot for t in times if t.first_slot is not None), default=None)
    token = min((t.first_token for t in times if t.first_token is not None), default=None)
    now = asyncio.get_running_loop().time()
    return {
        "queue_s": None if slot is None else slot - generation.started,
        "prefill_s": None if slot is None or token is None else token - slot,
        "first_token_s": None if token is None else token - generation.started,
        "decode_s": None if token is None else now - token,
    }


def _short(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value
