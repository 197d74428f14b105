"""One admitted request: its completions while they are written."""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from deployments.router.admission import Reservation
from deployments.router.health import Health
from deployments.router.loop import RoundLoop
from deployments.router.sequence import Delta, GenerationParams
from deployments.router.sequence import Sequence as LiveSequence
from deployments.router.tokenizer import Tokenizer
from workers.errors import RequestTimeoutError, TandemError, internal_error

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What all requests of a router are run by."""

    loop: RoundLoop
    health: Health
    """Told whenever a completion gets something from the loop."""
    slots: asyncio.Semaphore
    """One for each completion that may be in the loop at a time; the others wait."""
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """When a client gives its request up."""

    timeout_s: float
    at: float
    """On the event loop's clock, in seconds."""

    def error(self) -> RequestTimeoutError:
        return RequestTimeoutError(
            f"the request has not finished within {self.timeout_s:g} s, the time that its client "
            "gave it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request has used so far, all of its completions together."""

    num_prompt_tokens: int
    """Each prompt counts once, however many completions it has."""
    num_completion_tokens: int
    num_accepted: int
    """Draft tokens that stand in the completions."""
    num_rejected: int
    """Draft tokens that were verified and do not stand there."""


class Generation:
    """The completions of one request, in the order of their choices."""

    def __init__(
        self,
        choices: Sequence[GenerationParams],
        *,
        num_prompt_tokens: int,
        reservation: Reservation,
        deadline: Deadline | None,
        runtime: Runtime,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.choices = tuple(choices)
        self._num_prompt_tokens = num_prompt_tokens
        self._reservation = reservation
        self._deadline = deadline
        self._runtime = runtime
        self._sequences: list[LiveSequence] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def usage(self) -> Usage:
        counts = [sequence.counts for sequence in self._sequences]
        num_accepted = sum(count.num_accepted for count in counts)
        return Usage(
            num_prompt_tokens=self._num_prompt_tokens,
            num_completion_tokens=sum(s.num_output_tokens for s in self._sequences),
            num_accepted=num_accepted,
            num_rejected=sum(count.num_draft_tokens for count in counts) - num_accepted,
        )

    async def complete(self) -> list[Delta]:
        """Each completion as a whole, once all have finished; raises what `run` does."""
        deltas: list[list[Delta]] = [[] for _ in self.choices]
        async with aclosing(self.run()) as run:
            async for index, delta in run:
                deltas[index].append(delta)
        return [Delta.join(of_choice) for of_choice in deltas]

    async def run(self) -> AsyncGenerator[tuple[int, Delta]]:
        """Yield (choice, delta) until every choice has finished.

        Closing the iterator, by a client's disconnect say, cancels what still runs. Raises the
        error that ended a choice, and RequestTimeoutError when the client's time is over.
        """
        deltas: asyncio.Queue[tuple[int, Delta | TandemError]] = asyncio.Queue()
        for index, params in enumerate(self.choices):
            sequence = self._open_sequence(index, params, deltas)
            self._sequences.append(sequence)
            self._tasks.append(asyncio.create_task(self._run_sequence(sequence)))
        timer = None
        if self._deadline is not None:
            timed_out = (0, self._deadline.error())
            timer = asyncio.get_running_loop().call_at(
                self._deadline.at, deltas.put_nowait, timed_out
            )
        num_running = len(self.choices)
        try:
            while num_running:
                index, delta = await deltas.get()
                if isinstance(delta, TandemError):
                    raise delta
                num_running -= delta.finish_reason is not None
                yield index, delta
        finally:
            if timer is not None:
                timer.cancel()
            self.cancel()

    def cancel(self) -> None:
        """End what still runs."""
        for task in self._tasks:
            task.cancel()

    def _open_sequence(
        self,
        index: int,
        params: GenerationParams,
        deltas: asyncio.Queue[tuple[int, Delta | TandemError]],
    ) -> LiveSequence:
        def emit(delta: Delta | TandemError) -> None:
            self._runtime.health.progressed()
            deltas.put_nowait((index, delta))

        return LiveSequence.open(
            f"{self.id}-{index}",
            params,
            decoder=self._runtime.tokenizer,
            eos_token_ids=self._runtime.eos_token_ids,
            emit=emit,
        )

    async def _run_sequence(self, sequence: LiveSequence) -> None:
        """Wait for a slot, run to the end, or clean up when cancelled."""
        loop = self._runtime.loop
        async with self._runtime.slots:
            if loop.num_live == 0:
                self._runtime.health.progressed()  # it stood still for want of work
            try:
                loop.add(sequence)
                await sequence.done.wait()
            except Exception:  # a defect of ours; whoever waits for the text has to learn of it
                logger.exception("a completion failed")
                sequence.fail(internal_error())
            finally:
                loop.cancel(sequence)
                self._reservation.release_one()
