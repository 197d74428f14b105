"""What HTTP and gRPC share: from a validated request to a stream of text."""

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from deployments.api.openai import MAX_CHOICES, CompletionRequest
from deployments.router.admission import Admission, AdmissionLimits, Reservation
from deployments.router.health import Health
from deployments.router.loop import RoundLoop
from deployments.router.prompts import PromptReader, Tokenizer
from deployments.router.sequence import Delta, GenerationParams, SpeculationCounts
from deployments.router.sequence import Sequence as LiveSequence
from workers.errors import (
    ContextLengthError,
    InvalidRequestError,
    ModelNameError,
    RequestTimeoutError,
    TandemError,
)
from workers.types import SamplingParams, WorkerInfo, signed_64

logger = logging.getLogger(__name__)

LOWEST_TEMPERATURE = 1e-5
"""Below it, sampling is greedy, as in vLLM: logits divided by less would overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What this app serves."""

    name: str
    tokenizer: Tokenizer
    info: WorkerInfo
    created: int
    """Unix time, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """When a client gives its request up, on the event loop's clock."""

    timeout_s: float
    at: float


class Generation:
    """One admitted request's completions, as they are written."""

    def __init__(
        self,
        choices: Sequence[GenerationParams],
        *,
        num_prompt_tokens: int,
        reservation: Reservation,
        deadline: Deadline | None,
    ) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.choices = tuple(choices)
        self.num_prompt_tokens = num_prompt_tokens
        """Each prompt counts once, however many completions it has."""
        self.reservation = reservation
        self.deadline = deadline
        self.sequences: list[LiveSequence] = []
        self.tasks: list[asyncio.Task[None]] = []

    def cancel(self) -> None:
        """End what still runs."""
        for task in self.tasks:
            task.cancel()

    @property
    def num_completion_tokens(self) -> int:
        return sum(sequence.num_output_tokens for sequence in self.sequences)

    @property
    def counts(self) -> SpeculationCounts:
        """Of all choices together."""
        total = SpeculationCounts()
        for sequence in self.sequences:
            total.add(sequence.counts)
        return total


class GenerationService:
    """Validates, admits, tokenizes and runs requests."""

    def __init__(
        self, model: ServedModel, loop: RoundLoop, limits: AdmissionLimits, health: Health
    ) -> None:
        self.model = model
        self._loop = loop
        self._health = health
        self._admission = Admission(limits)
        self._prompts = PromptReader(model.tokenizer, max_model_len=model.info.max_model_len)
        self._slots = asyncio.Semaphore(limits.max_running)

    @property
    def num_unfinished(self) -> int:
        """Completions that are admitted and not finished."""
        return self._admission.num_unfinished

    def why_not_ready(self) -> str | None:
        """Why no target would answer a request now; None if one would."""
        return self._health.why_not_ready()

    def why_unhealthy(self) -> str | None:
        """Why this router is of no use any more; None if it is."""
        return self._health.why_unhealthy(num_live=self._loop.num_live)

    @asynccontextmanager
    async def open(
        self, request: CompletionRequest, *, timeout_s: float | None = None
    ) -> AsyncIterator[Generation]:
        """Admit a request for as long as the context lasts, and prepare its completions.

        All that can be said against it is said before anything costly is done. Whatever ends the
        context, a refusal, an error or a client that leaves, its room is free again and nothing of
        it runs on. `timeout_s` is how long the client waits for all of it. Raises
        InvalidRequestError and its kin, and OverloadedError.
        """
        started = asyncio.get_running_loop().time()
        num_choices = self._num_choices(request)
        with self._admission.reserve(num_choices) as reservation:
            prompts = await self._prompts.read(request.prompt)
            generation = Generation(
                self._choices(request, prompts),
                num_prompt_tokens=sum(len(prompt) for prompt in prompts),
                reservation=reservation,
                deadline=None
                if timeout_s is None
                else Deadline(timeout_s=timeout_s, at=started + timeout_s),
            )
            try:
                yield generation
            finally:
                generation.cancel()

    def _num_choices(self, request: CompletionRequest) -> int:
        if request.model != self.model.name:
            raise ModelNameError(
                f"model is {request.model!r}; the model served here is {self.model.name!r}",
                field="model",
            )
        num_choices = len(request.prompt) * request.n
        if num_choices > MAX_CHOICES:
            raise InvalidRequestError(
                f"{len(request.prompt)} prompts times n={request.n} makes {num_choices} "
                f"completions; at most {MAX_CHOICES} fit one request",
                field="prompt",
            )
        return num_choices

    async def run(self, generation: Generation) -> AsyncGenerator[tuple[int, Delta]]:
        """Yield (choice, delta) until every choice has finished.

        Closing the iterator, by a client's disconnect say, cancels what still runs. Raises the
        error that ended a choice, and RequestTimeoutError when the client's time is over.
        """
        deltas: asyncio.Queue[tuple[int, Delta | TandemError]] = asyncio.Queue()
        generation.sequences = [
            self._make_sequence(index, params, deltas)
            for index, params in enumerate(generation.choices)
        ]
        generation.tasks = [
            asyncio.create_task(self._run_one(sequence, generation.reservation))
            for sequence in generation.sequences
        ]
        timer = _start_timer(generation.deadline, deltas)
        try:
            num_running = len(generation.sequences)
            while num_running:
                index, delta = await deltas.get()
                if isinstance(delta, TandemError):
                    raise delta
                num_running -= delta.finish_reason is not None
                yield index, delta
        finally:
            if timer is not None:
                timer.cancel()
            generation.cancel()

    async def _run_one(self, sequence: LiveSequence, reservation: Reservation) -> None:
        """Wait for a slot, run to the end, or clean up when cancelled."""
        async with self._slots:
            if self._loop.num_live == 0:
                self._health.progressed()  # it stood still for want of work
            try:
                self._loop.add(sequence)
                await sequence.done.wait()
            except Exception:  # a defect of ours; whoever waits for the text has to learn of it
                logger.exception("a completion failed")
                sequence.fail(TandemError("internal error; the server's log says more"))
            finally:
                self._loop.cancel(sequence)
                reservation.release_one()

    def _make_sequence(
        self,
        index: int,
        params: GenerationParams,
        deltas: asyncio.Queue[tuple[int, Delta | TandemError]],
    ) -> LiveSequence:
        def emit(delta: Delta | TandemError) -> None:
            self._health.progressed()
            deltas.put_nowait((index, delta))

        return LiveSequence.open(
            uuid.uuid4().hex,
            params,
            decoder=self.model.tokenizer,
            eos_token_ids=self.model.info.eos_token_ids,
            emit=emit,
        )

    def _choices(
        self, request: CompletionRequest, prompts: Sequence[tuple[int, ...]]
    ) -> list[GenerationParams]:
        """What each completion is asked for; choice i of a prompt has the seed plus i, wrapped."""
        for prompt in prompts:
            self._check_prompt(prompt, request.max_tokens)
        seed = secrets.randbits(63) if request.seed is None else request.seed
        sampling = _sampling_params(request)
        self._check_token_ids("logit_bias", [token for token, _ in sampling.logit_bias])
        return [
            GenerationParams(
                prompt=prompt,
                max_tokens=request.max_tokens,
                sampling=sampling,
                seed=signed_64(seed + index),
                stop=tuple(request.stop),
                ignore_eos=request.ignore_eos,
                cache_salt=request.cache_salt,
            )
            for prompt in prompts
            for index in range(request.n)
        ]

    def _check_prompt(self, prompt: Sequence[int], max_tokens: int) -> None:
        if not prompt:
            raise InvalidRequestError(
                "prompt is empty: it has no tokens; give at least one", field="prompt"
            )
        limit = self.model.info.max_model_len
        if len(prompt) + max_tokens > limit:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens and max_tokens is {max_tokens}: "
                f"{len(prompt) + max_tokens} together, but the context of {self.model.name!r} is "
                f"{limit} tokens; shorten the prompt or lower max_tokens",
                field="prompt" if len(prompt) >= limit else "max_tokens",
            )
        self._check_token_ids("prompt", prompt)

    def _check_token_ids(self, field: str, token_ids: Sequence[int]) -> None:
        vocab_size = self.model.info.vocab_size
        for token in token_ids:
            if not 0 <= token < vocab_size:
                raise InvalidRequestError(
                    f"{field} has token id {token}; ids go from 0 to {vocab_size - 1}",
                    field=field,
                )


def _start_timer(
    deadline: Deadline | None, deltas: "asyncio.Queue[tuple[int, Delta | TandemError]]"
) -> asyncio.TimerHandle | None:
    """Let a request end with an error when its client's time is over."""
    if deadline is None:
        return None
    error = RequestTimeoutError(
        f"the request has not finished within {deadline.timeout_s:g} s, the time that its header "
        "x-request-timeout-seconds gave it"
    )
    loop = asyncio.get_running_loop()
    return loop.call_at(deadline.at, deltas.put_nowait, (0, error))


def _sampling_params(request: CompletionRequest) -> SamplingParams:
    is_greedy = request.temperature < LOWEST_TEMPERATURE
    return SamplingParams(
        temperature=0.0 if is_greedy else request.temperature,
        top_k=max(0, request.top_k),
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=tuple(sorted(request.logit_bias.items())),
    )
