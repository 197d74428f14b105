"""The messages of a chat as OpenAI's clients send them, read into neutral ones."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from deployments.api import unserved
from deployments.api.openai import Text
from deployments.api.text_parts import TextPart, joined
from deployments.api.validation import RequestModel, brief, field_error
from deployments.router.chat.message import Message, ToolCall

Role = Literal["system", "developer", "user", "assistant", "tool"]
ROLES = ("system", "developer", "user", "assistant", "tool")


MAX_MESSAGES = 4096
MAX_TOOLS = 128


def _known_role(value: Any) -> Any:
    if value not in ROLES:
        hint = "; functions are tools now" if value == "function" else ""
        raise ValueError(f"it must be one of {', '.join(ROLES)}{hint}")
    return value


def _joined(value: Any) -> Any:
    """Content as one text; parts are joined by line breaks, as vLLM does."""
    return joined(value, by="\n")


Content = Annotated[
    Text | None,
    BeforeValidator(_joined, json_schema_input_type=str | list[TextPart] | None),
]


class SentFunction(RequestModel):
    """The function of a call, in a message of an assistant."""

    name: Annotated[Text, Field(min_length=1)]
    arguments: Text = ""


class SentToolCall(RequestModel):
    """A call in a message of an assistant."""

    id: Text
    type: Literal["function"] = "function"
    function: SentFunction

    @classmethod
    def unserved_fields(cls) -> unserved.UnservedFields:
        return unserved.TOOL_CALL

    def to_call(self) -> ToolCall:
        return ToolCall(id=self.id, name=self.function.name, arguments=self.function.arguments)


class ChatMessage(RequestModel):
    """One message of the conversation, of any role."""

    role: Annotated[Role, BeforeValidator(_known_role, json_schema_input_type=Role)]
    content: Content = None
    name: Text | None = None
    tool_calls: list[SentToolCall] = Field(default_factory=list)
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Annotated[Text | None, Field(description="Another name of reasoning_content.")] = (
        None
    )

    @classmethod
    def unserved_fields(cls) -> unserved.UnservedFields:
        return unserved.MESSAGE

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        """Each role has its own fields."""
        if self.content is None and self.role != "assistant":
            raise field_error("content", f"content is missing in a message of the role {self.role}")
        if self.tool_call_id is None and self.role == "tool":
            raise field_error(
                "tool_call_id",
                "tool_call_id is missing: a tool's message says which call it answers",
            )
        if self.tool_call_id is not None and self.role != "tool":
            raise field_error("tool_call_id", "tool_call_id is only for messages of the role tool")
        if self.tool_calls and self.role != "assistant":
            raise field_error(
                "tool_calls", "tool_calls are only for messages of the role assistant"
            )
        return self

    def to_message(self) -> Message:
        is_empty = self.content is None and not self.tool_calls
        return Message(
            role=self.role,
            content="" if is_empty else self.content,
            name=self.name,
            reasoning=self.reasoning_content or self.reasoning,
            tool_calls=tuple(call.to_call() for call in self.tool_calls),
            tool_call_id=self.tool_call_id,
        )


def _counted(value: Any) -> Any:
    """Refuse more messages than can be checked in a moment, since others' streams wait for it."""
    if not isinstance(value, list):
        return value
    calls = (message.get("tool_calls") for message in value if isinstance(message, dict))
    num_items = len(value) + sum(len(sent) for sent in calls if isinstance(sent, list))
    if num_items > MAX_MESSAGES:
        raise ValueError(
            f"it has {num_items} messages and calls in them; at most {MAX_MESSAGES} are taken"
        )
    return value


def _checked_tools(value: Any) -> Any:
    """The tools as they were sent, since a template writes them out as they are."""
    if not isinstance(value, list):
        raise ValueError("it must be a list of tools")
    if len(value) > MAX_TOOLS:
        raise ValueError(f"it has {len(value)} tools; at most {MAX_TOOLS} are taken")
    for index, tool in enumerate(value):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise ValueError(f"tool {index} has the type {brief(kind)}; it must be 'function'")
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise ValueError(f"tool {index} has no function with a name")
        if not isinstance(function.get("parameters"), dict | None):
            raise ValueError(f"the parameters of tool {index}, {name!r}, are no object")
    return value


Messages = Annotated[list[ChatMessage], BeforeValidator(_counted)]
Tools = Annotated[list[dict[str, Any]], BeforeValidator(_checked_tools)]


def _check_choice(value: Any) -> Any:
    """A word, or the name of the function that has to be called."""
    if value in ("none", "auto", "required"):
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and name:
            return value
    raise ValueError(
        'it must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
    )


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | dict[str, Any], BeforeValidator(_check_choice)
]


def named_function(choice: str | dict[str, Any]) -> str | None:
    """The function that a choice names; None if it is a word."""
    return None if isinstance(choice, str) else choice["function"]["name"]
