"""The service behind every wire format: it checks, admits and tokenizes requests."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from deployments.router.admission import Admission, AdmissionLimits, Reservation
from deployments.router.chat.message import Conversation
from deployments.router.chat.reader import ConversationReader
from deployments.router.chat.requests import ChatRequests
from deployments.router.chat.template import ChatTemplate
from deployments.router.chat.text import MessageFormat
from deployments.router.completion import Runtime
from deployments.router.drafting import forced
from deployments.router.generation import Generation
from deployments.router.grammars import GrammarChecker, make_compiler
from deployments.router.health import Health
from deployments.router.loop import RoundLoop
from deployments.router.prompts import PromptReader
from deployments.router.request import (
    MAX_COMPLETIONS,
    SOMEBODY,
    Caller,
    GenerationRequest,
    check_shown_prompts,
    prompt_fields,
)
from deployments.router.request_log import RequestLog
from deployments.router.tenants.account import RateLimits
from deployments.router.tenants.keys import ANYBODY, Keys, Tenant
from deployments.router.tenants.slots import Slots
from deployments.router.tokenizer import Tokenizer
from workers.errors import ContextLengthError, InvalidRequestError, ModelNameError, TandemError
from workers.grammar_compiler import GrammarCompiler
from workers.sampling_params import SamplingParams
from workers.types import Rule, WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model that this app serves."""

    name: str
    aliases: tuple[str, ...] = ()
    """Other names under which it is asked for."""
    tokenizer: Tokenizer
    info: WorkerInfo
    draft: WorkerInfo | None = None
    """The draft model's worker, if there is one."""
    created: int
    """When the app started, in Unix time, seconds."""
    chat_template: ChatTemplate | None = None
    """The model's chat template; None where it has none, and so takes no conversations."""
    chat_stop: tuple[str, ...] = ()
    """Strings before which the answer to a conversation ends by itself."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names, the one that answers have first."""
        return (self.name, *self.aliases)


class GenerationService:
    """Turns requests into running generations, or says what is wrong with them."""

    def __init__(
        self,
        model: ServedModel,
        loop: RoundLoop,
        limits: AdmissionLimits,
        health: Health,
        *,
        grammars: GrammarCompiler | None = None,
        keys: Keys | None = None,
        log: RequestLog | None = None,
        verification: Rule = "coupled",
    ) -> None:
        """`grammars` is what compiles those of requests; by default one of its own.

        Drafts are judged by the rule `verification` where a request names none. Without `keys`
        anybody may ask; without a `log` none is written.
        """
        self.model = model
        self.keys = keys or Keys()
        self._log = log
        self._runtime = Runtime(
            loop=loop,
            health=health,
            slots=Slots(limits.max_running, timeout_s=limits.queue_timeout_s),
            tokenizer=model.tokenizer,
            eos_token_ids=model.info.eos_token_ids,
            max_model_len=model.info.max_model_len,
            verification=verification,
        )
        self._admission = Admission(limits)
        self._prompts = PromptReader(model.tokenizer, max_model_len=model.info.max_model_len)
        self._conversations = ConversationReader(model.chat_template, self._prompts)
        self._chats = ChatRequests(
            model.chat_template, model.tokenizer, stop_strings=model.chat_stop
        )
        self._grammars = GrammarChecker(grammars or make_compiler(model.tokenizer, model.info))

    @property
    def num_unfinished(self) -> int:
        """Completions that are admitted and not finished."""
        return self._admission.num_unfinished

    @property
    def num_waiting(self) -> int:
        """Completions that wait for their turn."""
        return self._runtime.slots.num_waiting

    def rate_limits(self, tenant: Tenant) -> RateLimits:
        """Where the limits of a key stand."""
        return self._admission.rate_limits(tenant)

    def why_not_ready(self) -> str | None:
        """Why no target would answer a request now; None if one would."""
        return self._runtime.health.why_not_ready()

    def why_unhealthy(self) -> str | None:
        """Why this router cannot serve any more; None if it can."""
        return self._runtime.health.why_unhealthy(num_live=self._runtime.loop.num_live)

    @asynccontextmanager
    async def open(
        self, request: GenerationRequest, caller: Caller = SOMEBODY
    ) -> AsyncIterator[Generation]:
        """Admit a request for as long as the context lasts, and prepare its completions.

        Whatever is wrong with it is said before anything costly is done. Whatever ends the context,
        a refusal, an error or a client that leaves, the request's room is free again and nothing of
        it runs on. Raises InvalidRequestError and its subclasses, and OverloadedError and its own.
        """
        started = asyncio.get_running_loop().time()
        generation: Generation | None = None
        error: TandemError | None = None
        try:
            self._check(request)
            request = self._chats.with_ends(self._chats.with_tags(request))
            with self._reserve(request.num_completions, caller.tenant) as reservation:
                generation = await self._prepare(request, caller.tenant, started, reservation)
                try:
                    yield generation
                finally:
                    generation.cancel()
                    reservation.settle(generation.usage.num_tokens)
        except TandemError as raised:
            error = raised
            raise
        finally:
            if self._log is not None:
                self._log.write(request, caller, generation, error, started=started)

    async def _prepare(
        self, request: GenerationRequest, tenant: Tenant, started: float, reservation: Reservation
    ) -> Generation:
        """Read the prompts and charge the key for what is to come; raises InvalidRequestError."""
        prompts = await self._prompts.read(
            await self._conversations.read(request.prompts, tenant),
            tenant,
            add_special_tokens=request.add_special_tokens,
            parse_special_tokens=request.parse_special_tokens,
        )
        for prompt, field in zip(prompts, prompt_fields(request.prompts), strict=True):
            self._check_prompt(prompt, request.max_tokens, field)
        check_shown_prompts(request, prompts)
        prediction = await self._prediction(request, tenant)
        request = self._chats.with_grammar(request, prompts)
        await self._grammars.check(request.sampling.grammar, tenant, field=request.grammar_field)
        generation = Generation(
            replace(request, sampling=await self._sampling(request, tenant)),
            prompts,
            prompt_texts=await self._prompt_texts(request, prompts, tenant),
            prediction=prediction,
            tenant=tenant,
            started=started,
            reservation=reservation,
            runtime=self._runtime,
        )
        num_new = sum(params.max_tokens for params in generation.choices)
        reservation.charge(sum(map(len, prompts)) + num_new)
        return generation

    def message_format(self, conversation: Conversation, prompt: Sequence[int]) -> MessageFormat:
        """How to read a completion of a conversation, whose token ids are `prompt`, as a message.

        Only for one that `open` has taken.
        """
        return self._chats.message_format(conversation, prompt)

    async def tokenize(
        self,
        prompt: str | Conversation,
        tenant: Tenant = ANYBODY,
        *,
        add_special_tokens: bool | None = None,
        parse_special_tokens: bool = True,
    ) -> tuple[int, ...]:
        """The token ids of a text or a conversation, which need not fit the context.

        It takes the room of one completion meanwhile; raises as `open` does.

        Args:
            add_special_tokens: whether the tokenizer adds its own, such as one that begins texts;
                None for what a completion of the prompt does.
            parse_special_tokens: whether the name of a special token in a text means that token; in
                a conversation it does.
        """
        with self._reserve(1, tenant):
            if isinstance(prompt, Conversation):
                return await self._conversations.tokenize(
                    prompt, tenant, add_special_tokens=add_special_tokens is True
                )
            (tokens,) = await self._prompts.read(
                [prompt],
                tenant,
                add_special_tokens=add_special_tokens is not False,
                parse_special_tokens=parse_special_tokens,
            )
            return tokens

    async def detokenize(self, token_ids: Sequence[int], tenant: Tenant = ANYBODY) -> str:
        """The text of token ids, which takes the room of one completion meanwhile.

        Raises InvalidRequestError for an id that the model has not, and as `open` does.
        """
        self._check_token_ids("tokens", token_ids)
        with self._reserve(1, tenant):
            return await self._prompts.detokenize(token_ids, tenant)

    def _reserve(self, num_completions: int, tenant: Tenant) -> Reservation:
        """Let a request in, to be used as a context manager at once; raises OverloadedError."""
        num_tenants = self.keys.ring.num_tenants
        return self._admission.reserve(num_completions, tenant, num_tenants=num_tenants)

    def token_names(self, token_ids: Sequence[int]) -> list[str]:
        """The names that the vocabulary has for tokens."""
        return self.model.tokenizer.convert_ids_to_tokens(list(token_ids))

    async def _sampling(self, request: GenerationRequest, tenant: Tenant) -> SamplingParams:
        """A request's parameters, with what only the tokenizer and the model can add."""
        sampling = request.sampling
        if request.bad_words:
            bad_words = await self._prompts.read_words(request.bad_words, tenant)
            sampling = replace(sampling, bad_words=bad_words)
        if sampling.min_tokens > 0 and not request.ignore_eos:
            end_tokens = (*sampling.stop_token_ids, *self.model.info.eos_token_ids)
            sampling = replace(sampling, stop_token_ids=end_tokens)
        return sampling

    async def _prediction(self, request: GenerationRequest, tenant: Tenant) -> tuple[int, ...]:
        """The tokens that the client expects; raises ContextLengthError for more than can be."""
        if not request.prediction:
            return ()
        (tokens,) = await self._prompts.read(
            [request.prediction], tenant, add_special_tokens=False, field="prediction"
        )
        limit = self.model.info.max_model_len
        if len(tokens) > limit:
            raise ContextLengthError(
                f"the prediction has {len(tokens)} tokens, but the context of {self.model.name!r} "
                f"is {limit} tokens; shorten the prediction",
                field="prediction",
            )
        return tokens

    async def _prompt_texts(
        self, request: GenerationRequest, prompts: Sequence[tuple[int, ...]], tenant: Tenant
    ) -> Sequence[tuple[str, ...]]:
        """What each token of each prompt adds to its text, if that is wanted."""
        if not request.echo:
            return ()
        return await self._prompts.split(
            prompts, tenant, skip_special_tokens=request.skip_special_tokens
        )

    def check_model(self, name: str | None) -> None:
        """Raise ModelNameError unless the model of this name is served; no name means it."""
        if name is None or name in self.model.names:
            return
        known = " or ".join(map(repr, self.model.names))
        raise ModelNameError(f"model is {name!r}; the model served here is {known}", field="model")

    def _check_drafter(self, request: GenerationRequest) -> None:
        if request.drafter is None:
            return
        # what a grammar forces is drafted where there is one, and nothing else is by that drafter
        drafters = [name for name in self._runtime.loop.drafters if name != forced.SOURCE]
        if request.drafter not in drafters:
            raise InvalidRequestError(
                f"speculation.mode is {request.drafter!r}; the drafters of this app are: "
                f"{', '.join(map(repr, drafters))}; use one of them, 'auto' or 'off'",
                field="speculation.mode",
            )

    def _check(self, request: GenerationRequest) -> None:
        """Raise for what can be seen before the prompts are tokenized."""
        self.check_model(request.model)
        self._check_drafter(request)
        if request.num_completions > MAX_COMPLETIONS:
            raise InvalidRequestError(
                f"{len(request.prompts)} prompts times {request.num_choices} makes "
                f"{request.num_completions} completions; at most {MAX_COMPLETIONS} fit one request",
                field="prompt",
            )
        self._check_min_tokens(request)
        self._check_token_ids("logit_bias", [token for token, _ in request.sampling.logit_bias])
        self._check_token_ids("stop_token_ids", request.sampling.stop_token_ids)

    def _check_min_tokens(self, request: GenerationRequest) -> None:
        least, most = request.sampling.min_tokens, request.max_tokens
        if most is not None and least > most:
            raise InvalidRequestError(
                f"min_tokens is {least} and max_tokens is {most}: no completion can have so many "
                "tokens; lower min_tokens or raise max_tokens",
                field="min_tokens",
            )

    def _check_prompt(self, prompt: Sequence[int], max_tokens: int | None, field: str) -> None:
        """Raise for a prompt that cannot be continued by `max_tokens`, or by one if None."""
        if not prompt:
            raise InvalidRequestError(
                "the prompt is empty: it has no tokens; give at least one", field=field
            )
        limit = self.model.info.max_model_len
        if max_tokens is None and len(prompt) >= limit:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens, but the context of {self.model.name!r} is "
                f"{limit} tokens; shorten the prompt",
                field=field,
            )
        if max_tokens is not None and len(prompt) + max_tokens > limit:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens and max_tokens is {max_tokens}: "
                f"{len(prompt) + max_tokens} together, but the context of {self.model.name!r} is "
                f"{limit} tokens; shorten the prompt or lower max_tokens",
                field=field if len(prompt) >= limit else "max_tokens",
            )
        self._check_token_ids(field, prompt)

    def _check_token_ids(self, field: str, token_ids: Sequence[int]) -> None:
        vocab_size = self.model.info.vocab_size
        for token in token_ids:
            if not 0 <= token < vocab_size:
                raise InvalidRequestError(
                    f"{field} has token id {token}; ids go from 0 to {vocab_size - 1}",
                    field=field,
                )
