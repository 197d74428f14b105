"""`POST /v1/completions`: its request, and how its answers are written."""

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, BeforeValidator, Field, model_validator

from deployments.api import unserved
from deployments.api.answers import Endpoint, respond
from deployments.api.errors import ERROR_RESPONSES
from deployments.api.fields import Takes
from deployments.api.http_proxy import request_timeout_s
from deployments.api.openai import OpenAIRequest, Usage
from deployments.api.validation import brief, check_text, field_error
from deployments.router.request import MAX_COMPLETIONS, GenerationRequest, Prompt
from deployments.router.sequence import Delta
from deployments.router.service import GenerationService

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
    """Beyond OpenAI's are top_k, min_p, repetition_penalty, ignore_eos and cache_salt."""

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
            description="Taken as OpenAI has it; all n completions are returned, never the best of "
            "more."
        ),
        Takes("the same as n"),
    ] = None

    @classmethod
    def off_values(cls) -> unserved.OffValues:
        return unserved.COMPLETIONS

    def generation_request(self, *, timeout_s: float | None = None) -> GenerationRequest:
        return self.to_request(model=self.model, prompts=self.prompt, n=self.n, timeout_s=timeout_s)

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of not in (None, self.n):
            raise field_error(
                "best_of",
                f"best_of is {brief(self.best_of)} and n is {brief(self.n)}: to return some of "
                "several completions is not served yet; leave it out or make it equal to n",
            )
        return self


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None


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

    def __init__(self, generation_id: str, model: str) -> None:
        self._id = f"cmpl-{generation_id}"
        self._created = int(time.time())
        self._model = model

    def whole(self, completions: Sequence[Delta], usage: Usage) -> Completion:
        return self._completion(list(map(_choice, range(len(completions)), completions)), usage)

    def event(self, index: int, delta: Delta, usage: Usage | None) -> Completion:
        return self._completion([_choice(index, delta)], usage)

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


def _choice(index: int, delta: Delta) -> CompletionChoice:
    return CompletionChoice(index=index, text=delta.text, finish_reason=delta.finish_reason)


def _add_route(app: FastAPI, service: GenerationService) -> None:
    @app.post(PATH, response_model=None, responses={200: {"model": Completion}, **ERROR_RESPONSES})
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        return await respond(
            service,
            body.generation_request(timeout_s=request_timeout_s(request.headers)),
            CompletionWriter,
            stream_options=body.used_stream_options,
        )


ENDPOINT = Endpoint(path=PATH, request_model=CompletionRequest, add_route=_add_route)
