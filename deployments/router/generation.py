"""One admitted request: its completions while they are written."""

import asyncio
import secrets
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest

from deployments.router.admission import Reservation
from deployments.router.completion import Completion, Deltas, Runtime
from deployments.router.request import GenerationRequest, check_shown_completions
from deployments.router.sequence import Delta, GenerationParams, ShownPrompt
from deployments.router.speculation_counts import SpeculationCounts
from deployments.router.tenants.keys import ANYBODY, Tenant
from workers.errors import InvalidRequestError, RequestTimeoutError, TandemError
from workers.types import Rule, signed_64


class Outcome(StrEnum):
    """How a request has ended, as the log of requests has it."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    """The request's client left."""
    FAILED = "failed"
    REFUSED = "refused"
    """The request never began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts of a request so far, all of its completions together."""

    num_prompt_tokens: int
    """Each prompt counts once, however many completions it has."""
    num_completion_tokens: int
    speculation: SpeculationCounts
    predicted: SpeculationCounts | None = None
    """The part of `speculation` that is drafts of the client's prediction; None if it sent none."""

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_completion_tokens

    @property
    def num_accepted(self) -> int:
        """Draft tokens that stand in the completions: those of the prediction, if there is one."""
        return (self.predicted or self.speculation).num_accepted

    @property
    def num_rejected(self) -> int:
        """Draft tokens, of the same drafters, that were verified and do not stand there."""
        return (self.predicted or self.speculation).num_draft_tokens - self.num_accepted


def choices_of(
    request: GenerationRequest,
    prompts: Sequence[tuple[int, ...]],
    prompt_texts: Sequence[tuple[str, ...]] = (),
    *,
    prediction: tuple[int, ...] = (),
    tenant: Tenant,
    max_model_len: int,
    verification: Rule = "coupled",
) -> tuple[GenerationParams, ...]:
    """The parameters of each completion; choice i of a prompt has the seed plus i, wrapped.

    `prompt_texts` are those of each prompt's tokens, if it is echoed; `verification` is the rule of
    a request that names none.
    """
    is_chosen = request.num_choices > request.n
    seed = secrets.randbits(63) if request.seed is None else request.seed
    shown_prompts = [
        ShownPrompt(prompt, texts) if request.shows_prompt else None
        for prompt, texts in zip_longest(prompts, prompt_texts, fillvalue=())
    ]
    return tuple(
        GenerationParams(
            prompt=prompt,
            max_tokens=(
                max_model_len - len(prompt) if request.max_tokens is None else request.max_tokens
            ),
            sampling=request.sampling,
            seed=signed_64(seed + index),
            stop=request.stop,
            include_stop=request.include_stop,
            ignore_eos=request.ignore_eos,
            skip_special_tokens=request.skip_special_tokens,
            cache_salt=request.cache_salt,
            num_logprobs=0 if is_chosen and request.num_logprobs is None else request.num_logprobs,
            num_prompt_logprobs=request.num_prompt_logprobs,
            shown_prompt=shown,
            prediction=prediction,
            drafter=request.drafter,
            max_gamma=request.max_gamma,
            verification=request.verification or verification,
            tenant=tenant,
        )
        for prompt, shown in zip(prompts, shown_prompts, strict=True)
        for index in range(request.num_choices)
    )


def _logprob(completion: Delta) -> float:
    """The log-probability of all tokens of a completion together."""
    return sum(record.logprob for record in completion.records if record.logprob is not None)


class Generation:
    """The completions of one request, in the order of their choices."""

    def __init__(
        self,
        request: GenerationRequest,
        prompts: Sequence[tuple[int, ...]],
        *,
        prompt_texts: Sequence[tuple[str, ...]] = (),
        prediction: tuple[int, ...] = (),
        tenant: Tenant = ANYBODY,
        started: float,
        reservation: Reservation,
        runtime: Runtime,
    ) -> None:
        """`prompts` and `prediction` are the request's, as token ids; it came at `started` on the
        loop's clock.

        `prompt_texts` are those of each prompt's tokens, if it is echoed.
        """
        self.id = uuid.uuid4().hex
        self.choices = choices_of(
            request,
            prompts,
            prompt_texts,
            prediction=prediction,
            tenant=tenant,
            max_model_len=runtime.max_model_len,
            verification=runtime.verification,
        )
        self._has_prediction = bool(prediction)
        self._num_made, self._num_wanted = request.num_choices, request.n
        self._num_logprobs = request.num_logprobs
        self._grammar_field = request.grammar_field
        self._num_prompt_tokens = sum(len(prompt) for prompt in prompts)
        self.started = started
        self._timeout_s = request.timeout_s
        self._priority = request.priority
        self._reservation = reservation
        self._runtime = runtime
        self.off_loop = runtime.off_loop
        """What writes long results of this request, as of any other."""
        self.completions: list[Completion] = []
        self.outcome = Outcome.CANCELLED
        self.error: TandemError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def usage(self) -> Usage:
        sequences = [completion.sequence for completion in self.completions]
        return Usage(
            num_prompt_tokens=self._num_prompt_tokens,
            num_completion_tokens=sum(s.num_output_tokens for s in sequences),
            speculation=SpeculationCounts.total(s.counts for s in sequences),
            predicted=(
                SpeculationCounts.total(s.predicted_counts for s in sequences)
                if self._has_prediction
                else None
            ),
        )

    async def complete(self) -> list[Delta]:
        """Each wanted completion as a whole, once all have finished; raises what `run` does.

        Where more are made than are wanted, those of a prompt come with the likeliest first.
        """
        deltas: list[list[Delta]] = [[] for _ in self.choices]
        num_tokens = 0
        async with aclosing(self.run()) as run:
            async for index, delta in run:
                deltas[index].append(delta)
                num_tokens += len(delta.records)
                check_shown_completions(num_tokens, self._num_logprobs)
        completions = [Delta.join(choice_deltas) for choice_deltas in deltas]
        if self._num_made == self._num_wanted:
            return completions
        return [
            completion
            for first in range(0, len(completions), self._num_made)
            for completion in sorted(
                completions[first : first + self._num_made], key=_logprob, reverse=True
            )[: self._num_wanted]
        ]

    async def run(self) -> AsyncGenerator[tuple[int, Delta]]:
        """Yield (choice, delta) until every choice has finished.

        Closing the iterator, by a client's disconnect say, cancels what still runs. Raises the
        error that ended a choice, and RequestTimeoutError when the client's time is over.
        """
        deltas: Deltas = asyncio.Queue()
        for index, params in enumerate(self.choices):
            completion = self._open(index, params, deltas)
            self.completions.append(completion)
            self._tasks.append(asyncio.create_task(completion.run(self._reservation)))
        timer = self._start_timer(deltas)
        num_running = len(self.choices)
        try:
            while num_running:
                index, delta = await deltas.get()
                if isinstance(delta, TandemError):
                    raise delta
                self.completions[index].took_one()
                num_running -= delta.finish_reason is not None
                yield index, delta
            self.outcome = Outcome.FINISHED
        except TandemError as error:
            if isinstance(error, InvalidRequestError) and error.field is None:
                error.field = self._grammar_field  # which is what a worker can refuse
            self.outcome, self.error = Outcome.FAILED, error
            raise
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
        deadline = self.started + self._timeout_s
        return asyncio.get_running_loop().call_at(deadline, deltas.put_nowait, (0, error))

    def _open(self, index: int, params: GenerationParams, deltas: Deltas) -> Completion:
        first_index = index - index % self._num_made
        is_sharing = index > first_index and params.num_prompt_logprobs is not None
        return Completion(
            index,
            f"{self.id}-{index}",
            params,
            priority=self._priority,
            deltas=deltas,
            runtime=self._runtime,
            first=self.completions[first_index] if is_sharing else None,
        )
