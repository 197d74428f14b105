"""A sequence that is being generated, and where it stands in the round loop."""

import asyncio
import logging
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, field

from deployments.router.sequence import Sequence
from deployments.router.suspicion import Suspicion
from workers.errors import (
    GenerationFailedError,
    TandemError,
    TargetUnavailableError,
    WorkerFailedError,
    WorkerLostError,
    WorkerTimeoutError,
    internal_error,
)

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 2.0


@dataclass(slots=True, eq=False)
class Live:
    """One sequence of a RoundLoop. All times are on the loop's clock, in seconds."""

    sequence: Sequence
    in_round: bool = False
    own_round: asyncio.Task[int] | None = None
    """The round it is in, when that has no other member."""
    not_before: float = 0.0
    """When it may try again after a failure."""
    failing_since: float | None = None
    is_leaving: bool = False
    """Whether it leaves the loop when its round ends, although its text has not ended."""
    has_left: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def suspicion(self) -> Suspicion:
        """Kept with the sequence, which may leave the loop and come back."""
        return self.sequence.suspicion

    @contextmanager
    def ended_by_errors(self) -> Iterator[None]:
        """Let whatever is raised within end this sequence and nothing else."""
        try:
            yield
        except TandemError as error:
            self.sequence.fail(error)
        except Exception:  # a defect of ours
            logger.exception("sequence %s has failed", self.sequence.seq_id)
            self.sequence.fail(internal_error())

    def note_progress(self, num_tokens: int) -> None:
        """A target has answered, with so many new tokens."""
        self.failing_since = None
        if num_tokens:
            self.suspicion.clear()

    def lose_target(self, error: Exception) -> None:
        """A round brought no answer: its cache is lost, and the sequence fails if it is to blame.

        Silence blames nobody: the call may have waited for a worker to start. Anything but a lost
        worker is a call that failed by what it carried.
        """
        self.sequence.target.forget()
        if isinstance(error, WorkerTimeoutError):
            return
        is_by_step = isinstance(error, WorkerFailedError) or not isinstance(error, WorkerLostError)
        if self.suspicion.add(is_by_step=is_by_step) and not self.sequence.is_done:
            logger.error("%s is not tried again: %s", self.sequence.seq_id, error)
            self.sequence.fail(
                GenerationFailedError(
                    "the workers that ran this request failed, the last one while it ran nothing "
                    "else that was suspected, so it is not tried again; the server's log says more"
                )
            )

    def try_again(self, error: Exception, *, now: float, timeout_s: float) -> float | None:
        """Set when to ask a target again; returns the pause, or None if the sequence has ended.

        It fails when no target has answered for `timeout_s`.
        """
        if self.sequence.is_done:
            return None
        self.failing_since = now if self.failing_since is None else self.failing_since
        failing_s = now - self.failing_since
        if failing_s > timeout_s:
            self.sequence.fail(
                TargetUnavailableError(
                    f"no target group answered for {failing_s:.0f} s; last error: {error}"
                )
            )
            return None
        pause_s = min(LAST_RETRY_S, max(FIRST_RETRY_S, failing_s / 2))
        self.not_before = now + pause_s
        return pause_s


@contextmanager
def ended_by_defects(members: SequenceOf[Live]) -> Iterator[None]:
    """Have a round's sequences, and no others, end by what is raised within: a defect of ours."""
    try:
        yield
    except Exception:
        logger.exception("a round failed")
        for live in members:
            if not live.sequence.is_done:
                live.sequence.fail(internal_error())
