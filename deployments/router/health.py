"""Health of a router, as `/health` and `/ready` report it.

Two things are watched. A probe asks the targets every other second, whatever the traffic; and the
rounds of the running completions have to bring something now and then.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

PROBE_PERIOD_S = 2.0
PROBE_TIMEOUT_S = 2.0
MAX_FAILED_PROBES = 2
"""Probes in a row without an answer that mean not ready: one replica of several may be stuck."""


class Health:
    """Signs of life of the targets and of the round loop; `clock` gives seconds."""

    def __init__(
        self, *, recovery_timeout_s: float, stall_timeout_s: float, clock: Callable[[], float]
    ) -> None:
        self._recovery_timeout_s = recovery_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock
        self._answered_at = clock()  # a router starts with an answer of a target
        self._progressed_at = clock()
        self._num_failed_probes = 0
        self._last_failure = "no probe has come back"

    def target_answered(self) -> None:
        self._answered_at = self._clock()
        self._num_failed_probes = 0

    def target_failed(self, reason: str) -> None:
        """A probe brought no answer."""
        self._num_failed_probes += 1
        self._last_failure = reason

    def progressed(self) -> None:
        """The loop has begun to work, or some completion has got something from it."""
        self._progressed_at = self._clock()

    def why_not_ready(self) -> str | None:
        """Why a request would have to wait for a target now; None if it would not."""
        silent_s = self._clock() - self._answered_at
        # a probe that is itself stuck counts as failed
        longest_s = (MAX_FAILED_PROBES + 1) * (PROBE_PERIOD_S + PROBE_TIMEOUT_S)
        if self._num_failed_probes < MAX_FAILED_PROBES and silent_s < longest_s:
            return None
        return f"no target group has answered for {silent_s:.0f} s: {self._last_failure}"

    def why_unhealthy(self, *, num_live: int) -> str | None:
        """Why this router cannot serve any more; None if it can. The round loop has `num_live`."""
        if self._clock() - self._answered_at > self._recovery_timeout_s:
            reason = self.why_not_ready()
            if reason is not None:
                return reason
        stalled_s = self._clock() - self._progressed_at
        if num_live > 0 and stalled_s > self._stall_timeout_s:
            return f"{num_live} completions run, but none has got anything for {stalled_s:.0f} s"
        return None


async def watch_targets(health: Health, ask: Callable[[], Awaitable[object]]) -> None:
    """Ask the targets for a sign of life, for ever."""
    while True:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await ask()
        except TimeoutError:
            health.target_failed(f"no answer within {PROBE_TIMEOUT_S:g} s")
        except Exception as error:  # whatever it was, no answer came
            logger.warning("no target answers a probe: %s", error)
            health.target_failed("the last call failed")
        else:
            health.target_answered()
        await asyncio.sleep(PROBE_PERIOD_S)
