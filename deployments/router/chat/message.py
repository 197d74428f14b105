"""Messages of a conversation, as a client sends them and as a model writes them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FIELD = "messages"
"""The field of a request, in every wire format, that holds a conversation."""

TOOLS_FIELD = "tools"
"""The field of a request that holds the functions which may be called."""

JsonObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of one of the client's functions that a model asks for."""

    id: str
    name: str
    arguments: str
    """The arguments as the model wrote them: a JSON object, unless the text ended before its
    end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: str
    """`system`, `developer`, `user`, `assistant` or `tool`."""
    content: str | None = None
    """The text; None where an assistant has only called tools."""
    name: str | None = None
    reasoning: str | None = None
    """What an assistant thought before it answered."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """Which call a tool's message answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A prompt that the model's chat template writes: messages and what goes with them."""

    messages: tuple[Message, ...]
    tools: tuple[JsonObject, ...] = ()
    """Functions that the model may call, as OpenAI describes them; none where it may not call."""
    parallel_tool_calls: bool = True
    """Whether a message may have more than one call."""
    must_call: bool = False
    """Whether the answer has to be nothing but calls."""
    named_function: str | None = None
    """The function that such an answer has to call, once; None for any of the tools."""
    add_generation_prompt: bool = True
    """Whether the prompt ends with the opening of an assistant's message."""
    continue_final_message: bool = False
    """Whether the prompt ends within the last message, which the completion then continues."""
    template_kwargs: JsonObject = field(default_factory=dict)
    """Further variables of the template, such as `enable_thinking`."""

    @property
    def has_one_call(self) -> bool:
        """Whether an answer has one call at most."""
        return not self.parallel_tool_calls or self.named_function is not None
