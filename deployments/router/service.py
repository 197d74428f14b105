"""What HTTP and gRPC share: from a validated request to a stream of text."""

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from deployments.api.openai import MAX_CHOICES, CompletionRequest, Prompt
from deployments.router.admission import AdmissionLimits, check_admission
from deployments.router.loop import RoundLoop
from deployments.router.sequence import Delta, GenerationParams, SpeculationCounts
from deployments.router.sequence import Sequence as LiveSequence
from workers.errors import (
    ContextLengthError,
    InvalidRequestError,
    ModelNameError,
    TandemError,
)
from workers.types import SamplingParams, WorkerInfo


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that the service needs."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What this app serves."""

    name: str
    tokenizer: Tokenizer
    info: WorkerInfo
    created: int
    """Unix time, seconds."""


class Generation:
    """One request's completions, as they are written."""

    def __init__(self, choices: Sequence[GenerationParams], created: int) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.created = created
        self.choices = tuple(choices)
        self.sequences: list[LiveSequence] = []

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(choice.prompt) for choice in self.choices)

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
    """Validates, tokenizes, admits and runs requests."""

    def __init__(self, model: ServedModel, loop: RoundLoop, limits: AdmissionLimits) -> None:
        self.model = model
        self._loop = loop
        self._limits = limits
        self._slots = asyncio.Semaphore(limits.max_running)
        self._num_unfinished = 0

    @property
    def num_unfinished(self) -> int:
        """Completions running or waiting."""
        return self._num_unfinished

    async def open(self, request: CompletionRequest) -> Generation:
        """Check a request and prepare its completions.

        Raises InvalidRequestError and its kin, and OverloadedError; nothing is held afterwards.
        """
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
        prompts = await asyncio.to_thread(self._tokenize, request.prompt)
        choices = self._choices(request, prompts)
        check_admission(self._limits, num_unfinished=self._num_unfinished, num_new=len(choices))
        return Generation(choices, created=int(time.time()))

    async def run(self, generation: Generation) -> AsyncGenerator[tuple[int, Delta]]:
        """Yield (choice, delta) until every choice has finished.

        Closing the iterator, by a client's disconnect say, cancels what still runs. Raises the
        error that ended a choice.
        """
        deltas: asyncio.Queue[tuple[int, Delta | TandemError]] = asyncio.Queue()
        generation.sequences = [
            self._make_sequence(index, params, deltas)
            for index, params in enumerate(generation.choices)
        ]
        tasks = [asyncio.create_task(self._run_one(s)) for s in generation.sequences]
        try:
            num_running = len(tasks)
            while num_running:
                index, delta = await deltas.get()
                if isinstance(delta, TandemError):
                    raise delta
                num_running -= delta.finish_reason is not None
                yield index, delta
        finally:
            for task in tasks:
                task.cancel()

    async def _run_one(self, sequence: LiveSequence) -> None:
        """Wait for a slot, run to the end, or clean up when cancelled."""
        self._num_unfinished += 1
        try:
            async with self._slots:
                self._loop.add(sequence)
                try:
                    await sequence.done.wait()
                finally:
                    self._loop.cancel(sequence)
        finally:
            self._num_unfinished -= 1

    def _make_sequence(
        self,
        index: int,
        params: GenerationParams,
        deltas: asyncio.Queue[tuple[int, Delta | TandemError]],
    ) -> LiveSequence:
        return LiveSequence.open(
            uuid.uuid4().hex,
            params,
            decoder=self.model.tokenizer,
            eos_token_ids=self.model.info.eos_token_ids,
            emit=lambda delta: deltas.put_nowait((index, delta)),
        )

    def _tokenize(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        return [
            tuple(self.model.tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]

    def _choices(
        self, request: CompletionRequest, prompts: Sequence[tuple[int, ...]]
    ) -> list[GenerationParams]:
        """What each completion is asked for; choice i of a prompt has the seed plus i."""
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
                seed=seed + index,
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
        self._check_token_ids("prompt", prompt)
        limit = self.model.info.max_model_len
        if len(prompt) + max_tokens > limit:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens and max_tokens is {max_tokens}: "
                f"{len(prompt) + max_tokens} together, but the context of {self.model.name!r} is "
                f"{limit} tokens; shorten the prompt or lower max_tokens",
                field="prompt" if len(prompt) >= limit else "max_tokens",
            )

    def _check_token_ids(self, field: str, token_ids: Sequence[int]) -> None:
        vocab_size = self.model.info.vocab_size
        for token in token_ids:
            if not 0 <= token < vocab_size:
                raise InvalidRequestError(
                    f"{field} has token id {token}; ids go from 0 to {vocab_size - 1}",
                    field=field,
                )


def _sampling_params(request: CompletionRequest) -> SamplingParams:
    return SamplingParams(
        temperature=request.temperature,
        top_k=max(0, request.top_k),
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=tuple(sorted(request.logit_bias.items())),
    )
