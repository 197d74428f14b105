"""Chats over gRPC: from a ChatRequest to HTTP's own request, and from texts to messages."""

import json
from typing import Any

from deployments.api import tandem_pb2
from deployments.api.chat import ChatCompletionRequest
from deployments.api.grpc_answers import parts_of, usage_of
from deployments.api.grpc_fields import given_fields, plain
from deployments.api.validation import brief
from deployments.router.chat.message import ToolCall
from deployments.router.chat.text import MessageFormat, MessageText, num_reasoning_tokens
from deployments.router.generation import Generation
from deployments.router.sequence import Delta
from workers.errors import InvalidRequestError


def chat_fields(request: tandem_pb2.ChatRequest) -> dict[str, Any]:
    """What the client has set, as a body of HTTP has it; raises InvalidRequestError."""
    fields = given_fields(request, ChatCompletionRequest) | conversation_fields(request)
    if request.tool_choice.startswith("{"):
        fields["tool_choice"] = _object("tool_choice", request.tool_choice)
    return fields


def tokenize_fields(request: tandem_pb2.TokenizeRequest) -> dict[str, Any]:
    """What the client has set of a request for tokens; an empty prompt is one where there are no
    messages."""
    names = (
        "add_special_tokens", "parse_special_tokens", "add_generation_prompt",
        "continue_final_message",
    )  # fmt: skip
    fields = {name: getattr(request, name) for name in names if request.HasField(name)}
    if request.prompt or not request.messages:
        fields["prompt"] = request.prompt
    return fields | conversation_fields(request)


def conversation_fields(
    request: tandem_pb2.ChatRequest | tandem_pb2.TokenizeRequest,
) -> dict[str, Any]:
    """A conversation, with its tools and template options, in the fields of HTTP."""
    fields: dict[str, Any] = {"messages": [plain(message) for message in request.messages]}
    if request.tools:
        fields["tools"] = [_tool(index, tool) for index, tool in enumerate(request.tools)]
    if request.chat_template_kwargs:
        fields["chat_template_kwargs"] = _object(
            "chat_template_kwargs", request.chat_template_kwargs
        )
    return fields


class Messages:
    """The messages that the texts of one generation are, as they grow."""

    def __init__(self, generation: Generation, message_format: MessageFormat) -> None:
        self._generation = generation
        self._texts = [MessageText(format=message_format) for _ in generation.choices]

    def choice(self, index: int, delta: Delta) -> tandem_pb2.ChatChoice:
        """A whole answer."""
        new = self._texts[index].take(delta)
        return tandem_pb2.ChatChoice(
            message=tandem_pb2.ChatMessage(
                role="assistant",
                content=None if new.tool_calls and not new.content else new.content,
                reasoning_content=new.reasoning or None,
                tool_calls=[_call(call) for _, call in new.tool_calls],
            ),
            **self._parts(index, delta),
        )

    def chunk(self, index: int, delta: Delta, *, is_last: bool) -> tandem_pb2.ChatChunk:
        """What a commit adds to an answer; the last one of all has the usage."""
        new = self._texts[index].take(delta)
        return tandem_pb2.ChatChunk(
            index=index,
            content=new.content,
            reasoning_content=new.reasoning,
            tool_calls=[_call(call, index=number) for number, call in new.tool_calls],
            id=f"chatcmpl-{self._generation.id}",
            usage=self.usage() if is_last else None,
            **self._parts(index, delta),
        )

    def usage(self) -> tandem_pb2.Usage:
        """The usage, with the tokens of the thoughts that were found so far."""
        return usage_of(self._generation, num_reasoning_tokens=num_reasoning_tokens(self._texts))

    def _parts(self, index: int, delta: Delta) -> dict[str, Any]:
        """What is said beside the message."""
        parts = parts_of(delta)
        del parts["text"]
        if delta.finish_reason is not None:
            parts["finish_reason"] = self._texts[index].finish_reason(delta.finish_reason)
        return parts


def _call(call: ToolCall, *, index: int | None = None) -> tandem_pb2.ToolCall:
    """A call; with an index, what is new of it, of which only the first piece has a name."""
    is_first = bool(call.name)
    return tandem_pb2.ToolCall(
        id=call.id if is_first else "",
        type="function" if is_first else "",
        function=tandem_pb2.FunctionCall(name=call.name, arguments=call.arguments),
        index=index,
    )


def _tool(index: int, tool: tandem_pb2.Tool) -> dict[str, Any]:
    function = plain(tool.function)
    if tool.function.parameters:
        function["parameters"] = _object(f"tools.{index}.parameters", tool.function.parameters)
    return {"type": tool.type or "function", "function": function}


def _object(field: str, text: str) -> dict[str, Any]:
    """The object that a field has as JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"{field} is {brief(text)}: it must be an object, as JSON", field=field
        )
    return value
