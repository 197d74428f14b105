"""One admitted request: its completions while they are written."""

import asyncio
import logging
import secrets
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from deployments.router.admission import Reservation
from deployments.router.health import Health
from deployments.router.loop import RoundLoop
from deployments.router.request import GenerationRequest
from deployments.router.sequence import Delta, GenerationParams
from deployments.router.sequence import Sequence as LiveSequence
from deployments.router.tokenizer import Tokenizer
from workers.errors import RequestTimeoutError, TandemError, internal_error
from workers.types import signed_64

logger = logging.getLogger(__name__)

Deltas = asyncio.Queue[tuple[int, Delta | TandemError]]
"""The queue of what completions emit, each with the index of its choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The parts of a router that run every request."""

    loop: RoundLoop
    health: Health
    """Told whenever a completion gets something from the loop."""
    slots: asyncio.Semaphore
    """One for each completion that may be in the loop at a time; the others wait."""
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts of a request so far, all of its completions together."""

    num_prompt_tokens: int
    """Each prompt counts once, however many completions it has."""
    num_completion_tokens: int
    num_accepted: int
    """Draft tokens that stand in the completions."""
    num_rejected: int
    """Draft tokens that were verified and do not stand there."""


def choices_of(
    request: GenerationRequest, prompts: Sequence[tuple[int, ...]]
) -> tuple[GenerationParams, ...]:
    """The parameters of each completion; choice i of a prompt has the seed plus i, wrapped."""
    seed = secrets.randbits(63) if request.seed is None else request.seed
    return tuple(
        GenerationParams(
            prompt=prompt,
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            seed=signed_64(seed + index),
            stop=request.stop,
            ignore_eos=request.ignore_eos,
            cache_salt=request.cache_salt,
        )
        for prompt in prompts
        for index in range(request.n)
    )


class Generation:
    """The completions of one request, in the order of their choices."""

    def __init__(
        self,
        request: GenerationRequest,
        prompts: Sequence[tuple[int, ...]],
        *,
        started: float,
        reservation: Reservation,
        runtime: Runtime,
    ) -> None:
        """`prompts` are the request's, as token ids; it came at `started` on the loop's clock."""
        self.id = uuid.uuid4().hex
        self.choices = choices_of(request, prompts)
        self._num_prompt_tokens = sum(len(prompt) for prompt in prompts)
        self._started = started
        self._timeout_s = request.timeout_s
        self._reservation = reservation
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
        return [Delta.join(choice_deltas) for choice_deltas in deltas]

    async def run(self) -> AsyncGenerator[tuple[int, Delta]]:
        """Yield (choice, delta) until every choice has finished.

        Closing the iterator, by a client's disconnect say, cancels what still runs. Raises the
        error that ended a choice, and RequestTimeoutError when the client's time is over.
        """
        deltas: Deltas = asyncio.Queue()
        for index, params in enumerate(self.choices):
            sequence = self._open_sequence(index, params, deltas)
            self._sequences.append(sequence)
            self._tasks.append(asyncio.create_task(self._run_sequence(sequence)))
        timer = self._start_timer(deltas)
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

    def _start_timer(self, deltas: Deltas) -> asyncio.TimerHandle | None:
        """End the request with an error when its client's time is over."""
        if self._timeout_s is None:
            return None
        error = RequestTimeoutError(
            f"the request has not finished within {self._timeout_s:g} s, the time that its client "
            "gave it"
        )
        deadline = self._started + self._timeout_s
        return asyncio.get_running_loop().call_at(deadline, deltas.put_nowait, (0, error))

    def _open_sequence(self, index: int, params: GenerationParams, deltas: Deltas) -> LiveSequence:
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
