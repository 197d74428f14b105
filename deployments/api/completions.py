"""`POST /v1/completions`: its request, and how its answers are written."""

import time
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, Self

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, BeforeValidator, Field, model_validator

from deployments.api import unserved
from deployments.api.answers import Answer, Endpoint
from deployments.api.errors import ERROR_RESPONSES
from deployments.api.http_proxy import request_timeout_s
from deployments.api.logprobs import (
    CompletionLogprobs,
    PromptLogprobs,
    completion_logprobs,
    prompt_logprobs,
)
from deployments.api.marks import Grpc, Takes
from deployments.api.openai import OpenAIRequest, Usage
from deployments.api.sampling_fields import MAX_INTEGER
from deployments.api.validation import brief, check_text, field_error
from deployments.router.generation import Generation
from deployments.router.request import MAX_COMPLETIONS, GenerationRequest, Prompt
from deployments.router.sequence import Delta
from deployments.router.service import GenerationService
from deployments.router.tokenizer import TokenNames

PATH = "/v1/completions"

SentPrompt = (
    str
    | Annotated[list[int], Field(min_length=1)]
    | Annotated[list[str | list[int]], Field(min_length=1, max_length=MAX_COMPLETIONS)]
)
"""The forms that a client may give its prompts, for the schema."""


def _listed(value: Any) -> list[Prompt]:
    """A list of prompts, whichever of the four forms was sent."""
    if isinstance(value, str) or _is_token_ids(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError("it must be a string, a list of token ids, or a list of either")
    if len(value) > MAX_COMPLETIONS:
        raise ValueError(f"it has {len(value)} prompts; at most {MAX_COMPLETIONS} fit one request")
    for index, prompt in enumerate(value):
        if not isinstance(prompt, str) and not _is_token_ids(prompt):
            raise ValueError(
                f"item {index} is {brief(prompt)}; it must be a string or a list of token ids"
            )
    return [check_text(prompt) if isinstance(prompt, str) else tuple(prompt) for prompt in value]


def _is_token_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    )


class CompletionRequest(OpenAIRequest):
    """OpenAI's fields, and those of vLLM's that GenerationFields has."""

    prompt: Annotated[
        list[Prompt],
        BeforeValidator(_listed, json_schema_input_type=SentPrompt),
        Field(description="What the completions continue."),
        Takes(
            f"a string, a list of token ids, or a list of either; at most {MAX_COMPLETIONS} prompts"
        ),
    ]
    best_of: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_COMPLETIONS,
            description="So many completions of each prompt are made, and the `n` returned whose "
            "tokens have the greatest log-probability together, the likeliest first. Not with "
            "`stream`, unless it equals `n`.",
        ),
        Grpc(31),
    ] = None
    echo: Annotated[
        bool,
        Field(
            description="If true, the text begins with the prompt's, as its tokens spell it, and "
            "`logprobs` with those of the prompt's tokens."
        ),
        Grpc(32),
    ] = False
    add_special_tokens: Annotated[
        bool,
        Field(
            description="If false, a prompt's text gets no tokens of the tokenizer's own, such as "
            "one that begins texts."
        ),
        Grpc(33),
    ] = True
    parse_special_tokens: Annotated[
        bool,
        Field(
            description="If false, the name of a special token in a prompt's text is a text like "
            "any other."
        ),
        Grpc(34),
    ] = True
    max_completion_tokens: Annotated[
        int | None,
        Field(ge=1, le=MAX_INTEGER, description="OpenAI's newer name of max_tokens."),
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool, Field(description="If true, `logprobs` names tokens like `token_id:15`.")
    ] = False

    @classmethod
    def unserved_fields(cls) -> unserved.UnservedFields:
        return unserved.COMPLETIONS

    @property
    def shows_prompt(self) -> bool:
        return self.echo or self.prompt_logprobs is not None

    def generation_request(self, *, timeout_s: float | None = None) -> GenerationRequest:
        request = self.to_request(
            model=self.model, prompts=self.prompt, n=self.n, timeout_s=timeout_s
        )
        num_prompt_logprobs = [
            number
            for number in (self.prompt_logprobs, self.logprobs if self.echo else None)
            if number is not None
        ]
        return replace(
            request,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            best_of=self.best_of,
            echo=self.echo,
            num_prompt_logprobs=max(num_prompt_logprobs, default=None),
            add_special_tokens=self.add_special_tokens,
            parse_special_tokens=self.parse_special_tokens,
        )

    @model_validator(mode="after")
    def _check_max_completion_tokens(self) -> Self:
        is_given_twice = {"max_tokens", "max_completion_tokens"} <= self.model_fields_set
        if is_given_twice and self.max_tokens != self.max_completion_tokens:
            raise field_error(
                "max_completion_tokens",
                f"max_completion_tokens is {self.max_completion_tokens} and max_tokens is "
                f"{self.max_tokens}: they mean the same; send one of them",
            )
        return self

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of in (None, self.n):
            return self
        if self.best_of is not None and self.best_of < self.n:
            reason = "it must be at least n"
        elif self.stream:
            reason = "a stream cannot wait for the best; leave it out or make it equal to n"
        else:
            return self
        values = f"best_of is {brief(self.best_of)} and n is {brief(self.n)}"
        raise field_error("best_of", f"{values}: {reason}")


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(BaseModel):
    """The answer, and each event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class CompletionWriter:
    """Writes a generation's results as OpenAI's completions."""

    def __init__(
        self, generation: Generation, model: str, *, request: CompletionRequest, names: TokenNames
    ) -> None:
        self._id = f"cmpl-{generation.id}"
        self._created = int(time.time())
        self._model = model
        self._request = request
        self._name = _id_name if request.return_tokens_as_token_ids else names.name
        self._prompt_lens: dict[int, int] = {}
        """Characters of the echoed prompt of each choice."""

    def answer(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def events(self, index: int, delta: Delta, usage: Usage | None) -> list[Completion]:
        return [self._completion([self.choice(index, delta)], usage)]

    def usage_event(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
        )

    def choice(self, index: int, delta: Delta) -> CompletionChoice:
        """All of a choice, or what a commit adds to it."""
        request = self._request
        echoed = "".join(record.text for record in delta.prompt) if request.echo else ""
        prompt_len = self._prompt_lens.setdefault(index, len(echoed))
        choice = CompletionChoice(
            index=index, text=echoed + delta.text, finish_reason=delta.finish_reason
        )
        if request.logprobs is not None:
            write = partial(completion_logprobs, name=self._name, num_top=request.logprobs)
            choice.logprobs = write(delta.records, first_offset=prompt_len)
            if request.echo:
                choice.logprobs = write(delta.prompt, first_offset=0) + choice.logprobs
        if request.prompt_logprobs is not None and delta.prompt:
            choice.prompt_logprobs = prompt_logprobs(
                delta.prompt, self._name, num_top=request.prompt_logprobs
            )
        if request.return_token_ids:
            choice.token_ids = list(delta.token_ids)
            if delta.prompt:
                choice.prompt_token_ids = [record.token_id for record in delta.prompt]
        return choice


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _add_route(app: FastAPI, service: GenerationService) -> None:
    names = TokenNames(service.model.tokenizer)

    @app.post(PATH, response_model=None, responses={200: {"model": Completion}, **ERROR_RESPONSES})
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        return Answer(
            service,
            body.generation_request(timeout_s=request_timeout_s(request.headers)),
            partial(CompletionWriter, request=body, names=names),
            stream_options=body.used_stream_options,
        )


ENDPOINT = Endpoint(path=PATH, request_model=CompletionRequest, add_route=_add_route)
