"""The chat template of a model: it makes a conversation into the text that the model continues.

A template is a program in Jinja that comes with the model. transformers runs it in a sandbox.
"""

import inspect
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from deployments.router.chat.message import FIELD, TOOLS_FIELD, Conversation, Message
from deployments.router.chat.reasoning import KNOWN_TAGS, ReasoningTags
from deployments.router.chat.template_file import read_template
from deployments.router.chat.text import MessageFormat
from deployments.router.chat.time_limit import run_within
from deployments.router.chat.tool_calls import Function, ToolCallFormat
from deployments.router.chat.tool_formats import FORMATS, PlainFormat
from deployments.router.tokenizer import ChatTokenizer
from workers.errors import ConfigError, InvalidRequestError, first_line
from workers.tool_call_grammar import ToolCalls

AUTO, NONE = "auto", "none"
CHECK_TIMEOUT_S = 30.0
RESERVED_VARIABLES = frozenset(
    {"messages"}.union(
        *(
            inspect.signature(function).parameters
            for function in (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template)
        )
    )
)
"""Variables of a template, and options of its rendering, that a client may not set by name."""
_TOOL_FORMATS = {tool_format.name: tool_format for tool_format in FORMATS}


class ChatTemplate:
    """The chat template of a served model, and how that model writes its messages."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        source: str | None = None,
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> None:
        """`source` comes in place of the tokenizer's own template, which there has to be else."""
        self._tokenizer = tokenizer
        self._source = source
        self._text = source if source is not None else _joined(tokenizer.chat_template)
        self.tool_calls = _tool_call_format(tool_call_parser, self._text)
        self.reasoning = _reasoning_tags(reasoning_parser, self._text)

    @property
    def has_tools(self) -> bool:
        """Whether the template has a place for tools."""
        return "tools" in self._text

    def render(self, conversation: Conversation) -> str:
        """The conversation as a prompt.

        Raises InvalidRequestError, with the template's own sentence if it has one. A template may
        take for ever: see `run_within`.
        """
        reserved = RESERVED_VARIABLES & conversation.template_kwargs.keys()
        if reserved:
            raise InvalidRequestError(
                f"chat_template_kwargs has {min(reserved)!r}, which is no variable for clients to "
                "set; leave it out",
                field="chat_template_kwargs",
            )
        if conversation.tools and not self.has_tools:
            raise InvalidRequestError(
                "tools are given, but the model's chat template has no place for any; leave them "
                "out, or start the server with another template by chat_template=<a file>",
                field=TOOLS_FIELD,
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                [self._as_dict(message) for message in conversation.messages],
                tools=[dict(tool) for tool in conversation.tools] or None,
                chat_template=self._source,
                add_generation_prompt=conversation.add_generation_prompt,
                continue_final_message=conversation.continue_final_message,
                tokenize=False,
                **conversation.template_kwargs,
            )
            text.encode()
        except TemplateError as error:
            raise InvalidRequestError(
                f"the model's chat template refuses the messages: {first_line(error)}", field=FIELD
            ) from None
        except UnicodeEncodeError:
            raise InvalidRequestError(
                "the messages, tools or chat_template_kwargs have half of a surrogate pair, which "
                "is no character",
                field=FIELD,
            ) from None
        except RecursionError:
            raise InvalidRequestError(
                "the messages, tools or chat_template_kwargs are nested too deeply for the model's "
                "chat template",
                field=FIELD,
            ) from None
        except Exception as error:  # whatever a template's program can raise
            # transformers' own are sentences, others say little without their name
            name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise InvalidRequestError(
                "the model's chat template cannot be applied to the messages: "
                f"{name}{first_line(error)}",
                field=FIELD,
            ) from None
        return text

    def check(self, path: str) -> None:
        """Raise ConfigError if the template, from a file, is none."""
        try:
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": "Hello"}], chat_template=self._source, tokenize=False
            )
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"chat_template is {path!r}, which is no template in Jinja: {first_line(error)} "
                f"(line {error.lineno}); mend it, or give another file"
            ) from None
        except Exception:  # it may want a system message first, or tools
            return

    def message_format(self, conversation: Conversation, prompt_end: str) -> MessageFormat:
        """How to read what the model writes to a conversation.

        Args:
            prompt_end: the end of the rendered conversation, special tokens included.
        """
        tags = self.reasoning
        return MessageFormat(
            tool_calls=self._calls_of(conversation),
            max_tool_calls=1 if conversation.has_one_call else None,
            is_call_named=conversation.named_function is not None,
            reasoning=tags,
            is_reasoning_open=tags is not None and _is_open(tags, conversation, prompt_end),
        )

    def forced_calls(self, conversation: Conversation) -> ToolCalls:
        """What the answer to a conversation that must be calls looks like."""
        calls = self._calls_of(conversation)
        assert calls is not None
        named = conversation.named_function
        functions = [_function(tool["function"]) for tool in conversation.tools]
        wanted = [function for function in functions if named in (None, function.name)]
        written = calls.write(wanted, self._text)
        return replace(written, is_one=conversation.has_one_call)

    def _calls_of(self, conversation: Conversation) -> ToolCallFormat | None:
        """How the answer to a conversation calls tools; None if calls are not looked for."""
        if self.tool_calls is None and conversation.must_call:
            return PlainFormat(conversation.named_function)
        return self.tool_calls if conversation.tools else None

    def needs_special_tokens(self, conversation: Conversation) -> bool:
        """Whether the tags in the model's text are special tokens, which texts leave out else."""
        tags = [self.reasoning.opening, self.reasoning.closing] if self.reasoning else []
        if (calls := self._calls_of(conversation)) is not None:
            tags.append(calls.tag)
        return not set(self._tokenizer.all_special_tokens).isdisjoint(tags)

    def _as_dict(self, message: Message) -> dict[str, Any]:
        """A message as templates have it: nothing that is not there, arguments as objects."""
        is_unknown = message.role == "developer" and "developer" not in self._text
        values = {
            "role": "system" if is_unknown else message.role,
            "content": message.content,
            "name": message.name,
            "reasoning_content": message.reasoning,
            "tool_call_id": message.tool_call_id,
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": _as_object(call.arguments)},
                }
                for call in message.tool_calls
            ]
            or None,
        }
        return {key: value for key, value in values.items() if value is not None}


async def load_chat_template(
    tokenizer: ChatTokenizer,
    *,
    path: str | None,
    tool_call_parser: str = AUTO,
    reasoning_parser: str = AUTO,
) -> ChatTemplate | None:
    """The template in a file, or the tokenizer's own; None if there is neither.

    Raises ConfigError for a file that holds no template.
    """
    if path is None and not tokenizer.chat_template:
        return None
    template = ChatTemplate(
        tokenizer,
        source=None if path is None else read_template(path),
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
    )
    if path is not None:
        try:
            await run_within(CHECK_TIMEOUT_S, lambda: template.check(path))
        except TimeoutError:
            raise ConfigError(
                f"chat_template is {path!r}, which takes more than {CHECK_TIMEOUT_S:g} s for one "
                "message; does it loop? Mend it, or give another file"
            ) from None
    return template


def _joined(templates: str | Mapping[str, str] | None) -> str:
    """All templates of a tokenizer, which may have one for chats with tools."""
    if templates is None or isinstance(templates, str):
        return templates or ""
    return "\n".join(templates.values())


def _tool_call_format(parser: str, template: str) -> ToolCallFormat | None:
    """The format of this name, or with AUTO the one that the template tells the model to use."""
    if parser != AUTO:
        return _TOOL_FORMATS.get(parser)
    return next((found for found in FORMATS if found.is_used_in(template)), None)


def _reasoning_tags(parser: str, template: str) -> ReasoningTags | None:
    """The tags that the template has, with AUTO; the most common ones with another name."""
    if parser == NONE:
        return None
    found = next((tags for tags in KNOWN_TAGS if tags.closing in template), None)
    return found if found is not None or parser == AUTO else KNOWN_TAGS[0]


def _is_open(tags: ReasoningTags, conversation: Conversation, prompt_end: str) -> bool:
    """Whether a prompt has ended within thoughts. What users write about tags opens none."""
    if conversation.continue_final_message:
        return tags.is_open_in(conversation.messages[-1].content or "")
    return prompt_end.rstrip().endswith(tags.opening)


def _function(described: Mapping[str, Any]) -> Function:
    """A function as OpenAI describes it. One without parameters takes none."""
    schema = described.get("parameters") or {"properties": {}, "additionalProperties": False}
    return Function(name=described["name"], schema={**schema, "type": "object"})


def _as_object(arguments: str) -> Any:
    """A call's arguments as templates take them; those that are no object stay as they are."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
