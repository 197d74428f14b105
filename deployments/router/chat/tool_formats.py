"""The formats in which models were taught to call tools."""

import json
import re
import secrets
import string
from collections.abc import Collection, Sequence

from deployments.router.chat.json_text import Members, Span, find_end, read_members, skip_space
from deployments.router.chat.tool_calls import (
    UNDECIDED,
    Block,
    FoundCall,
    Function,
    ToolCallFormat,
)
from workers.tool_call_grammar import ToolCalls, WrittenCall

ARGUMENTS = ("arguments", "parameters")
"""The keys under which a call may have its arguments."""
_BARE_KEYS = frozenset({"name", "type", "id", *ARGUMENTS})
_UNDECIDED_CALL = FoundCall(name="", arguments="")
_MISPLACED_BRACKETS = re.compile(r"[\s}\]]*")
_SEPARATOR = re.compile(r"\s*;?\s*")
_ALPHANUMERIC = string.ascii_letters + string.digits


class HermesFormat:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen and others."""

    name = "hermes"
    tag = "<tool_call>"
    _end_tag = "</tool_call>"

    def read(self, text: str, start: int) -> Block | None:
        start = skip_space(text, start)
        if start == len(text):
            return UNDECIDED
        block = _read_object(text, start)
        if block is None or block.end is None:
            return block
        # models forget brackets, or write too many
        end = _MISPLACED_BRACKETS.match(text, block.end)
        assert end is not None
        return Block(calls=block.calls, end=_skip_tag(text, end.end(), self._end_tag))

    def write(self, functions: Sequence[Function], template: str) -> ToolCalls:  # noqa: ARG002
        before, after = f"{self.tag}\n", f"\n{self._end_tag}"
        return ToolCalls(
            calls=tuple(_object_of(function, before=before, after=after) for function in functions),
            between="\n",
            tags=(self.tag, self._end_tag),
        )

    def make_id(self) -> str:
        return _common_id()

    def is_used_in(self, template: str) -> bool:
        """Others have the tag too, with something else than JSON in it."""
        is_other = "<function=" in template or "<arg_key>" in template
        return self.tag in template and not is_other


class LlamaFormat:
    """`{"name": ..., "parameters": {...}}` as the whole text, or several: Llama 3."""

    name = "llama3_json"
    tag = ""
    _python_tag = "<|python_tag|>"

    def read(self, text: str, start: int) -> Block | None:
        start = skip_space(text, start)
        if self._python_tag.startswith(text[start:]):
            return UNDECIDED
        if text.startswith(self._python_tag, start):
            start = skip_space(text, start + len(self._python_tag))
            if start == len(text):
                return UNDECIDED
        calls: list[FoundCall] = []
        while start < len(text):
            block = _read_object(text, start, is_bare=True)
            if block is None:
                break
            calls += block.calls
            if block.end is None:
                return Block(calls=tuple(calls))
            start = _skip_separator(text, block.end)
        return Block(calls=tuple(calls), end=start) if calls else None

    def write(self, functions: Sequence[Function], template: str) -> ToolCalls:  # noqa: ARG002
        calls = tuple(_object_of(function, key="parameters") for function in functions)
        return ToolCalls(calls=calls, between="; ")

    def make_id(self) -> str:
        return _common_id()

    def is_used_in(self, template: str) -> bool:
        return '{"name": function name, "parameters"' in template


class MistralFormat:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` of
    newer models, with or without `[ARGS]`."""

    name = "mistral"
    tag = "[TOOL_CALLS]"
    _arguments_tag = "[ARGS]"
    _name = re.compile(r"[\w.-]{1,256}+")
    _tags = r"(?:\[CALL_ID\]\s*+\w{0,64}+\s*+)?(?:\[ARGS\]\s*+)?"
    _head = re.compile(rf"({_name.pattern})\s*+{_tags}")
    _begun_tag = re.compile(r"(?:\[[A-Z_]{0,8})?\Z")

    def read(self, text: str, start: int) -> Block | None:
        start = skip_space(text, start)
        if start == len(text):
            return UNDECIDED
        if text[start] == "[":
            return _read_list(text, start + 1)
        if text[start] == "{":
            return _read_object(text, start)
        head = self._head.match(text, start)
        if head is None:
            return None
        if not text.startswith("{", head.end()):
            return UNDECIDED if self._begun_tag.match(text, head.end()) else None
        end = find_end(text, head.end())
        call = FoundCall(name=head[1], arguments=text[head.end() : end])
        return Block(calls=(call,), end=end)

    def write(self, functions: Sequence[Function], template: str) -> ToolCalls:
        has_names = all(self._name.fullmatch(function.name) for function in functions)
        if self._arguments_tag in template and has_names:
            calls = tuple(
                WrittenCall(
                    function=function.name,
                    before=f"{self.tag}{function.name}{self._arguments_tag}",
                    schema=function.schema,
                )
                for function in functions
            )
            return ToolCalls(calls=calls, tags=(self.tag, self._arguments_tag))
        space = " " if f"{self.tag} [" in template else ""
        return _list_of(functions, before=f"{self.tag}{space}", tags=(self.tag,))

    def make_id(self) -> str:
        """Nine letters and digits, which these models' templates insist on."""
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))

    def is_used_in(self, template: str) -> bool:
        return self.tag in template


class PlainFormat:
    """JSON alone, for calls that are forced on a model whose own format is not known: the arguments
    of the one function, or `[{"name": ..., "arguments": {...}}, ...]`."""

    name = "json"
    tag = ""

    def __init__(self, function: str | None) -> None:
        """`function` is the one whose arguments the text is; None for a list."""
        self._function = function

    def read(self, text: str, start: int) -> Block | None:
        start = skip_space(text, start)
        if start == len(text):
            return UNDECIDED
        if self._function is None:
            return _read_list(text, start + 1) if text[start] == "[" else None
        if text[start] != "{":
            return None
        end = find_end(text, start)
        return Block(calls=(FoundCall(name=self._function, arguments=text[start:end]),), end=end)

    def write(self, functions: Sequence[Function], template: str) -> ToolCalls:  # noqa: ARG002
        if self._function is None:
            return _list_of(functions)
        calls = (WrittenCall(function=f.name, schema=f.schema) for f in functions)
        return ToolCalls(calls=tuple(calls))

    def make_id(self) -> str:
        return _common_id()

    def is_used_in(self, template: str) -> bool:  # noqa: ARG002
        return False


FORMATS: tuple[ToolCallFormat, ...] = (HermesFormat(), LlamaFormat(), MistralFormat())
"""The formats of calls that models were taught."""


def _common_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _object_of(
    function: Function, *, key: str = "arguments", before: str = "", after: str = ""
) -> WrittenCall:
    """A call as an object with its name and, under `key`, its arguments."""
    name = json.dumps(function.name, ensure_ascii=False)
    return WrittenCall(
        function=function.name,
        before=f'{before}{{"name": {name}, "{key}": ',
        schema=function.schema,
        after=f"}}{after}",
    )


def _list_of(
    functions: Sequence[Function], *, before: str = "", tags: tuple[str, ...] = ()
) -> ToolCalls:
    """Calls as a list of objects."""
    calls = tuple(map(_object_of, functions))
    return ToolCalls(calls=calls, before=f"{before}[", between=", ", after="]", tags=tags)


def _skip_tag(text: str, start: int, tag: str) -> int | None:
    """The position behind a tag that may stand at `start`; None while it may yet come."""
    if text.startswith(tag, start):
        return start + len(tag)
    return None if tag.startswith(text[start:]) else start


def _skip_separator(text: str, start: int) -> int:
    found = _SEPARATOR.match(text, start)
    assert found is not None
    return found.end()


def _read_list(text: str, start: int) -> Block | None:
    """The calls in a list whose bracket stands before `start`; None if there are none."""
    calls: list[FoundCall] = []
    while True:
        start = skip_space(text, start)
        if start == len(text):
            return Block(calls=tuple(calls))
        block = _read_object(text, start) if text[start] == "{" else None
        if block is None:
            end = start + text.startswith("]", start)
            return Block(calls=tuple(calls), end=end) if calls else None
        calls += block.calls
        if block.end is None:
            return Block(calls=tuple(calls))
        start = skip_space(text, block.end)
        start += text.startswith(",", start)


def _read_object(text: str, start: int, *, is_bare: bool = False) -> Block | None:
    """The call that an object at `start` is; None if it is none.

    An object that no tag announces is only taken for a call if it has no keys but a call's.
    """
    if text[start] != "{":
        return None
    members = read_members(text, start)
    found = _find_call(text, members, _BARE_KEYS if is_bare else None)
    if found is None:
        return None
    if found is not _UNDECIDED_CALL:
        return Block(calls=(found,), end=members.end)
    return UNDECIDED if members.end is None else None


def _find_call(
    text: str, members: Members, allowed_keys: Collection[str] | None
) -> FoundCall | None:
    """The call that an object's members make, _UNDECIDED_CALL as long as it is none yet.

    It is a call from the member on with which it has a name and arguments; what follows then
    changes nothing.
    """
    name: str | None = None
    arguments: str | None = None
    for key, span in members.values.items():
        if allowed_keys is not None and key not in allowed_keys:
            return None
        if key == "name" and span.end is not None:
            name = _as_string(text[span.start : span.end])
            if not name:
                return None
        elif key in ARGUMENTS and arguments is None:
            arguments = _arguments(text, span)
        if name and arguments is not None:
            return FoundCall(name=name, arguments=arguments)
    if name and members.is_whole:
        return FoundCall(name=name, arguments="{}")
    return _UNDECIDED_CALL


def _arguments(text: str, span: Span) -> str | None:
    """A call's arguments as far as they have come; None if they have not begun."""
    written = text[span.start : span.end]
    if written[0] in "{[":
        return written
    if span.end is None:
        return None
    if written == "null":
        return "{}"
    as_string = _as_string(written)
    return written if as_string is None else as_string


def _as_string(written: str) -> str | None:
    """The text that a string of JSON stands for; None if it is no string."""
    try:
        value = json.loads(written)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
