"""One completion of a request: its turns in the round loop, and its reader, who may be slow."""

import asyncio
import logging
from dataclasses import dataclass, field

from deployments.router.admission import Reservation
from deployments.router.health import Health
from deployments.router.loop import RoundLoop
from deployments.router.off_loop import OffLoop
from deployments.router.sequence import Delta, GenerationParams, Sequence
from deployments.router.tenants.slots import Slots
from deployments.router.tokenizer import Tokenizer
from workers.errors import TandemError, internal_error
from workers.types import Rule

logger = logging.getLogger(__name__)

MAX_UNREAD = 64
"""Deltas of a completion that may wait for their reader; with more it stands still."""

Deltas = asyncio.Queue[tuple[int, Delta | TandemError]]
"""The queue of what completions emit, each with the index of its choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The parts of a router that run every request."""

    loop: RoundLoop
    health: Health
    """The router's health, which is told whenever a completion gets something from the loop."""
    slots: Slots
    """The slots, one for each completion that may be in the loop at a time; the others wait."""
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    verification: Rule = "coupled"
    """The rule by which drafts are judged where a request names none."""
    off_loop: OffLoop = field(default_factory=OffLoop)
    """What does long work of requests beside the event loop."""


@dataclass(slots=True, kw_only=True)
class Times:
    """When a completion got so far, on the event loop's clock; None until then."""

    first_slot: float | None = None
    first_token: float | None = None


class Completion:
    """Runs one sequence while it has a slot and its reader keeps up.

    It leaves the loop between rounds, and goes on where it was: whoever has its tokens loses
    nothing but time.
    """

    def __init__(
        self,
        index: int,
        seq_id: str,
        params: GenerationParams,
        *,
        priority: int,
        deltas: Deltas,
        runtime: Runtime,
        first: "Completion | None" = None,
    ) -> None:
        """Everything that it emits is put into `deltas`, with the `index` of its choice.

        `first` is a completion of the same prompt, if the log-probabilities of the prompt are
        wanted: this one takes them over, and begins when they are known.
        """
        self.times = Times()
        self._first = first
        self._has_begun = asyncio.Event()
        self._index = index
        self._deltas = deltas
        self._runtime = runtime
        self._num_unread = 0
        self._has_room = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self._place = runtime.slots.queue(
            params.tenant, priority=priority, num_tokens=len(params.prompt) + params.max_tokens
        )
        self.sequence = Sequence(
            seq_id,
            params,
            decoder=runtime.tokenizer,
            eos_token_ids=runtime.eos_token_ids,
            emit=self._emit,
        )

    def took_one(self) -> None:
        """The reader has taken a delta."""
        self._num_unread -= 1
        if self._num_unread <= MAX_UNREAD // 2:
            self._has_room.set()

    async def run(self, reservation: Reservation) -> None:
        """Run to the end, or clean up when cancelled; then there is room for another."""
        loop = self._runtime.loop
        try:
            if self._first is not None:
                await self._first._has_begun.wait()
                self.sequence.prompt_logprobs = self._first.sequence.prompt_logprobs
            with self._place as place:
                await place.wait_first()
                self.times.first_slot = self._clock()
                try:
                    while not self.sequence.is_done:
                        place.interrupted.clear()
                        await place.has_slot.wait()
                        if not place.has_slot.is_set():  # it was taken away again meanwhile
                            continue
                        if loop.num_live == 0:
                            self._runtime.health.progressed()  # it stood still for want of work
                        loop.add(self.sequence)
                        await place.interrupted.wait()
                        if not self.sequence.is_done:
                            await loop.suspend(self.sequence)
                            await self._wait_for_reader()
                finally:
                    loop.cancel(self.sequence)
                    place.num_used = len(self.sequence.tokens)
        except TandemError as error:
            self.sequence.fail(error)
        except Exception:  # a defect of ours; whoever waits for the text has to learn of it
            logger.exception("a completion failed")
            self.sequence.fail(internal_error())
        finally:
            reservation.release_one()

    async def _wait_for_reader(self) -> None:
        """Let others have the slot while the reader is behind."""
        if self._num_unread < MAX_UNREAD or self.sequence.is_done:
            return
        self._has_room.clear()
        self._place.step_aside()
        await self._has_room.wait()
        self._place.step_back()

    def _emit(self, delta: Delta | TandemError) -> None:
        self._runtime.health.progressed()
        if self.times.first_token is None and isinstance(delta, Delta):
            self.times.first_token = self._clock()
            self._has_begun.set()
        self._deltas.put_nowait((self._index, delta))
        self._num_unread += 1
        is_last = isinstance(delta, TandemError) or delta.finish_reason is not None
        if is_last or self._num_unread >= MAX_UNREAD:
            self._place.interrupted.set()
