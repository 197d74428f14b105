"""The answers of `POST /v1/chat/completions`: what they look like, and how they are written."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from deployments.api.logprobs import (
    ChatLogprobs,
    Name,
    PromptLogprobs,
    chat_logprobs,
    prompt_logprobs,
)
from deployments.api.openai import Usage
from deployments.router.chat.message import Conversation, ToolCall
from deployments.router.chat.text import MessageDelta, MessageText, num_reasoning_tokens
from deployments.router.generation import Generation
from deployments.router.sequence import Delta
from deployments.router.service import GenerationService


def _is_absent(value: object) -> bool:
    return value is None


class Function(BaseModel):
    name: Annotated[str | None, Field(exclude_if=_is_absent)] = None
    """The function's name; in a stream, only in the first of a call's deltas."""
    arguments: str = ""


class ToolCallChoice(BaseModel):
    """A call, or in a stream what is new of it: then it has its index, and its id once."""

    index: Annotated[int | None, Field(exclude_if=_is_absent)] = None
    id: Annotated[str | None, Field(exclude_if=_is_absent)] = None
    type: Annotated[Literal["function"] | None, Field(exclude_if=_is_absent)] = None
    function: Function


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    """The text; null where the answer is nothing but calls of tools."""
    reasoning_content: Annotated[str | None, Field(exclude_if=_is_absent)] = None
    tool_calls: Annotated[list[ToolCallChoice] | None, Field(exclude_if=_is_absent)] = None


class AssistantDelta(BaseModel):
    """What is new of a message."""

    role: Annotated[Literal["assistant"] | None, Field(exclude_if=_is_absent)] = None
    content: Annotated[str | None, Field(exclude_if=_is_absent)] = None
    reasoning_content: Annotated[str | None, Field(exclude_if=_is_absent)] = None
    tool_calls: Annotated[list[ToolCallChoice] | None, Field(exclude_if=_is_absent)] = None


class TokenDetails(BaseModel):
    """What a client may ask for beside the message, about its tokens and the prompt's."""

    logprobs: ChatLogprobs | None = None
    prompt_logprobs: Annotated[PromptLogprobs | None, Field(exclude_if=_is_absent)] = None
    token_ids: Annotated[list[int] | None, Field(exclude_if=_is_absent)] = None
    prompt_token_ids: Annotated[list[int] | None, Field(exclude_if=_is_absent)] = None


class ChatChoice(TokenDetails):
    index: int
    message: AssistantMessage
    finish_reason: str | None


class ChunkChoice(TokenDetails):
    index: int
    delta: AssistantDelta
    finish_reason: str | None = None


class ChatCompletion(BaseModel):
    """The answer to a request without a stream."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatChunk(BaseModel):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedOfChat:
    """The part of a request that decides what its answer has."""

    conversation: Conversation
    num_top_logprobs: int | None
    """Likeliest tokens beside each token; None for no log-probabilities."""
    num_prompt_logprobs: int | None
    token_ids: bool
    name: Name
    """The text that stands for a token."""

    def details(self, delta: Delta) -> dict[str, Any]:
        """The fields of TokenDetails for the tokens of a delta; none that was not asked for."""
        details: dict[str, Any] = {}
        if self.num_top_logprobs is not None:
            details["logprobs"] = chat_logprobs(
                delta.records, self.name, num_top=self.num_top_logprobs
            )
        if self.num_prompt_logprobs is not None and delta.prompt:
            details["prompt_logprobs"] = prompt_logprobs(
                delta.prompt, self.name, num_top=self.num_prompt_logprobs
            )
        if self.token_ids:
            details["token_ids"] = list(delta.token_ids)
            if delta.prompt:
                details["prompt_token_ids"] = [record.token_id for record in delta.prompt]
        return details


class ChatWriter:
    """Writes a generation's results as OpenAI's chat completions."""

    def __init__(
        self, generation: Generation, model: str, *, service: GenerationService, asked: AskedOfChat
    ) -> None:
        self._id = f"chatcmpl-{generation.id}"
        self._created = int(time.time())
        self._model = model
        self._asked = asked
        message_format = service.message_format(asked.conversation, generation.choices[0].prompt)
        self._texts = [MessageText(format=message_format) for _ in generation.choices]
        self._begun: set[int] = set()
        """The choices whose stream has begun."""

    def answer(self, usage: Usage) -> ChatCompletion:
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[],
            usage=self._with_reasoning(usage),
        )

    def choice(self, index: int, delta: Delta) -> ChatChoice:
        text = self._texts[index]
        message = text.take(delta)
        calls = [_call(call) for _, call in message.tool_calls]
        return ChatChoice(
            index=index,
            message=AssistantMessage(
                content=None if calls and not message.content else message.content,
                reasoning_content=message.reasoning or None,
                tool_calls=calls or None,
            ),
            finish_reason=text.finish_reason(delta.finish_reason),
            **self._asked.details(delta),
        )

    def events(self, index: int, delta: Delta, usage: Usage | None) -> Iterator[ChatChunk]:
        """The events of a delta: first the role, then what is new, and the finish reason by
        itself."""
        if index not in self._begun:
            self._begun.add(index)
            yield self._chunk(index, AssistantDelta(role="assistant", content=""), usage)
        text = self._texts[index]
        new = text.take(delta)
        details = self._asked.details(delta)
        if new or details:
            yield self._chunk(index, _delta(new), usage, **details)
        if delta.finish_reason is not None:
            reason = text.finish_reason(delta.finish_reason)
            yield self._chunk(index, AssistantDelta(), usage, finish_reason=reason)

    def usage_event(self, usage: Usage) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[],
            usage=self._with_reasoning(usage),
        )

    def _with_reasoning(self, usage: Usage) -> Usage:
        usage.completion_tokens_details.reasoning_tokens = num_reasoning_tokens(self._texts)
        return usage

    def _chunk(
        self, index: int, delta: AssistantDelta, usage: Usage | None, **more: Any
    ) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[ChunkChoice(index=index, delta=delta, **more)],
            usage=usage,
        )


def _delta(new: MessageDelta) -> AssistantDelta:
    return AssistantDelta(
        content=new.content or None,
        reasoning_content=new.reasoning or None,
        tool_calls=[_call_delta(index, call) for index, call in new.tool_calls] or None,
    )


def _call(call: ToolCall) -> ToolCallChoice:
    function = Function(name=call.name, arguments=call.arguments)
    return ToolCallChoice(id=call.id, type="function", function=function)


def _call_delta(index: int, call: ToolCall) -> ToolCallChoice:
    if call.name:
        return _call(call).model_copy(update={"index": index})
    return ToolCallChoice(index=index, function=Function(arguments=call.arguments))
