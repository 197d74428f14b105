"""`POST /v1/chat/completions`: its request."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Self

from fastapi import FastAPI, Request, Response
from pydantic import Field, model_validator

from deployments.api import unserved
from deployments.api.answers import Answer, Endpoint
from deployments.api.chat_answers import AskedOfChat, ChatCompletion, ChatWriter
from deployments.api.chat_messages import ToolChoice, named_function
from deployments.api.conversation_fields import ConversationFields
from deployments.api.errors import ERROR_RESPONSES
from deployments.api.fields import MAX_LOGPROBS
from deployments.api.http_proxy import request_timeout_s
from deployments.api.marks import Grpc, Takes
from deployments.api.openai import OpenAIRequest
from deployments.api.sampling_fields import MAX_INTEGER
from deployments.api.validation import brief, field_error
from deployments.router.chat.message import Conversation
from deployments.router.request import GenerationRequest
from deployments.router.service import GenerationService
from deployments.router.tokenizer import TokenNames

PATH = "/v1/chat/completions"
MAX_TOKENS = (
    "Tokens of each answer at most, thoughts included; by default what the context has left."
)


class ChatCompletionRequest(OpenAIRequest, ConversationFields):
    """OpenAI's fields, those that completions have beside them, and those of chat templates."""

    max_tokens: Annotated[
        int | None,
        Field(ge=1, le=MAX_INTEGER, description=MAX_TOKENS),
        Grpc(4),
    ] = None  # type: ignore[assignment]  # a completion's default is a number
    max_completion_tokens: Annotated[
        int | None,
        Field(ge=1, le=MAX_INTEGER, description="OpenAI's newer name of max_tokens."),
    ] = None
    logprobs: Annotated[
        bool,
        Field(
            description="If true, each token has its log-probability by the target's own law, "
            "before temperature, penalties and whatever else shapes the choice."
        ),
        Grpc(57),
    ] = False
    top_logprobs: Annotated[
        int | None,
        Field(
            ge=0,
            le=MAX_LOGPROBS,
            description="The same for so many of the likeliest tokens in its place, with logprobs.",
        ),
        Grpc(58),
    ] = None
    tool_choice: Annotated[
        ToolChoice,
        Field(
            description="With none, the model is not told of the tools, and calls are not looked "
            "for. With required, the answer is one or more calls of tools and nothing else; with a "
            "function, one call of that."
        ),
        Takes(
            'auto, none, required or {"type": "function", "function": {"name": ...}}; over gRPC '
            "the object as JSON"
        ),
        Grpc(51),
    ] = "auto"
    parallel_tool_calls: Annotated[
        bool,
        Field(
            description="If false, the answer has one call at most: if it is forced to call, no "
            "other is written, else calls after the first are left out."
        ),
        Grpc(52),
    ] = True
    reasoning_effort: Annotated[
        str | None,
        Field(
            max_length=32,
            description="The variable of this name of the chat template, if it has it.",
        ),
        Grpc(56),
    ] = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @classmethod
    def unserved_fields(cls) -> unserved.UnservedFields:
        return unserved.CHAT

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise field_error(
                "max_completion_tokens",
                f"max_completion_tokens is {self.max_completion_tokens} and max_tokens is "
                f"{self.max_tokens}: they mean the same; send one of them",
            )
        if self.top_logprobs and not self.logprobs:
            raise field_error(
                "top_logprobs",
                f"top_logprobs is {self.top_logprobs}, but logprobs is not true; send "
                "logprobs: true too",
            )
        return self

    @model_validator(mode="after")
    def _check_tool_choice(self) -> Self:
        choice = self.tool_choice
        if choice in ("none", "auto"):
            return self
        names = [tool["function"]["name"] for tool in self.tools]
        if not names:
            raise field_error(
                "tool_choice",
                f"tool_choice is {brief(choice)}, but there are no tools; send tools with it",
            )
        name = named_function(choice)
        if name is not None and name not in names:
            raise field_error(
                "tool_choice",
                f"tool_choice is the function {brief(name)}, but tools has none of that name; "
                "add it to tools, or choose one of them",
            )
        if self.grammar_field is not None:
            raise field_error(
                "tool_choice",
                f"tool_choice is {brief(choice)} and {self.grammar_field} is given: both say what "
                "the whole answer is; leave one of them out",
            )
        return self

    def generation_request(self, *, timeout_s: float | None = None) -> GenerationRequest:
        request = self.to_request(
            model=self.model, prompts=[self.conversation()], n=self.n, timeout_s=timeout_s
        )
        if self.max_completion_tokens is None:
            return request
        return replace(request, max_tokens=self.max_completion_tokens)

    def conversation(self) -> Conversation:
        return replace(
            super().conversation(),
            tools=() if self.tool_choice == "none" else tuple(self.tools),
            parallel_tool_calls=self.parallel_tool_calls,
            must_call=self.tool_choice not in ("none", "auto"),
            named_function=named_function(self.tool_choice),
        )

    def asked(self, names: TokenNames) -> AskedOfChat:
        """What the answer has to have."""
        return AskedOfChat(
            conversation=self.conversation(),
            num_top_logprobs=self.num_logprobs,
            num_prompt_logprobs=self.prompt_logprobs,
            token_ids=self.return_token_ids,
            name=names.name,
        )

    def template_kwargs(self) -> Mapping[str, Any]:
        """Variables of the template: `chat_template_kwargs` and those of OpenAI's fields given."""
        named = ("reasoning_effort", "tool_choice", "parallel_tool_calls")
        given = {name: getattr(self, name) for name in named if name in self.model_fields_set}
        return {**given, **super().template_kwargs()}


def _add_route(app: FastAPI, service: GenerationService) -> None:
    names = TokenNames(service.model.tokenizer)

    @app.post(
        PATH, response_model=None, responses={200: {"model": ChatCompletion}, **ERROR_RESPONSES}
    )
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        return Answer(
            service,
            body.generation_request(timeout_s=request_timeout_s(request.headers)),
            partial(ChatWriter, service=service, asked=body.asked(names)),
            stream_options=body.used_stream_options,
        )


ENDPOINT = Endpoint(path=PATH, request_model=ChatCompletionRequest, add_route=_add_route)
