"""Finding the calls of tools in what a model writes, in the formats that models were taught.

A text is read from its beginning each time that it has grown, and what is found then holds whatever
follows. So it does not matter into which pieces a text came.
"""

import json
import re
import secrets
import string
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from deployments.router.chat.json_text import Members, Span, find_end, read_members, skip_space

ARGUMENTS = ("arguments", "parameters")
"""The keys under which a call may have its arguments."""
_BARE_KEYS = frozenset({"name", "type", "id", *ARGUMENTS})
_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCall:
    """A call in a text that may not have ended."""

    name: str
    arguments: str
    """As far as they have come, as the model wrote them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The calls at one place of a text."""

    calls: tuple[FoundCall, ...] = ()
    end: int | None = None
    """Where other text goes on; None while it is not known, for the block may go on. A block of
    no calls without an end may yet become one, or turn out to be none."""

    @property
    def is_undecided(self) -> bool:
        return not self.calls and self.end is None


UNDECIDED = Block()
UNDECIDED_CALL = FoundCall(name="", arguments="")


class ToolCallFormat(Protocol):
    """How a model writes calls of tools."""

    name: str
    tag: str
    """What calls stand behind; empty where they stand at the beginning of the text."""

    def read(self, text: str, start: int) -> Block | None:
        """The calls behind a tag that ends at `start`; None if there are none."""
        ...

    def make_id(self) -> str:
        """An id for a call."""
        ...

    def is_used_in(self, template: str) -> bool:
        """Whether a chat template tells its model to write calls so."""
        ...


def find_calls(
    text: str, tool_format: ToolCallFormat, *, is_final: bool
) -> tuple[str, list[FoundCall]]:
    """What a text says beside its calls, and the calls.

    As long as the text is not final, the content leaves out what may become part of a call. Spaces
    around calls are left out; a line break separates what stood before and behind them.
    """
    pieces: list[str] = []
    calls: list[FoundCall] = []
    position = search_from = 0
    while (start := _find_tag(text, tool_format.tag, search_from)) is not None:
        block = tool_format.read(text, start + len(tool_format.tag))
        if block is None or (block.is_undecided and is_final):
            search_from = start + max(1, len(tool_format.tag))
            continue
        pieces.append(text[position:start])
        calls += block.calls
        if block.end is None:
            return _joined(pieces), calls
        position = search_from = block.end
    rest = text[position:]
    if not is_final:
        rest = rest[: len(rest) - num_held(rest, tool_format.tag)].rstrip()
    elif not calls:
        return text, []
    return _joined([*pieces, rest]), calls


def _find_tag(text: str, tag: str, search_from: int) -> int | None:
    if not tag:
        return 0 if search_from == 0 else None
    found = text.find(tag, search_from)
    return found if found >= 0 else None


def _joined(pieces: Sequence[str]) -> str:
    """Texts between calls as one. Only the spaces before the first may be meant."""
    first, *others = pieces
    kept = [first.rstrip(), *(piece.strip() for piece in others)]
    return "\n".join(piece for piece in kept if piece)


def num_held(text: str, tag: str) -> int:
    """The length of the longest end of a text that begins a tag."""
    longest = min(len(tag) - 1, len(text))
    lengths = range(longest, 0, -1)
    return next((length for length in lengths if tag.startswith(text[-length:])), 0)


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
                return Block(calls=tuple(calls)) if calls else UNDECIDED
            start = _skip_separator(text, block.end)
        return Block(calls=tuple(calls), end=start) if calls else None

    def make_id(self) -> str:
        return _common_id()

    def is_used_in(self, template: str) -> bool:
        return '{"name": function name, "parameters"' in template


class MistralFormat:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` of
    newer models, with or without `[ARGS]`."""

    name = "mistral"
    tag = "[TOOL_CALLS]"
    _head = re.compile(
        r"([\w.-]{1,256}+)\s*+(?:\[CALL_ID\]\s*+\w{0,64}+\s*+)?(?:\[ARGS\]\s*+)?"
    )
    _begun_tag = re.compile(r"(?:\[[A-Z_]{0,8})?\Z")

    def read(self, text: str, start: int) -> Block | None:
        start = skip_space(text, start)
        if start == len(text):
            return UNDECIDED
        if text[start] == "[":
            return self._read_list(text, start + 1)
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

    def _read_list(self, text: str, start: int) -> Block | None:
        calls: list[FoundCall] = []
        while True:
            start = skip_space(text, start)
            if start == len(text):
                return Block(calls=tuple(calls)) if calls else UNDECIDED
            block = _read_object(text, start) if text[start] == "{" else None
            if block is None:
                end = start + text.startswith("]", start)
                return Block(calls=tuple(calls), end=end) if calls else None
            calls += block.calls
            if block.end is None:
                return Block(calls=tuple(calls)) if calls else UNDECIDED
            start = skip_space(text, block.end)
            start += text.startswith(",", start)

    def make_id(self) -> str:
        """Nine letters and digits, which these models' templates insist on."""
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))

    def is_used_in(self, template: str) -> bool:
        return self.tag in template


FORMATS: tuple[ToolCallFormat, ...] = (HermesFormat(), LlamaFormat(), MistralFormat())

_MISPLACED_BRACKETS = re.compile(r"[\s}\]]*")
_SEPARATOR = re.compile(r"\s*;?\s*")


def _common_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _skip_tag(text: str, start: int, tag: str) -> int | None:
    """The position behind a tag that may stand at `start`; None while it may yet come."""
    if text.startswith(tag, start):
        return start + len(tag)
    return None if tag.startswith(text[start:]) else start


def _skip_separator(text: str, start: int) -> int:
    found = _SEPARATOR.match(text, start)
    assert found is not None
    return found.end()


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
    if found is not UNDECIDED_CALL:
        return Block(calls=(found,), end=members.end)
    return UNDECIDED if members.end is None else None


def _find_call(
    text: str, members: Members, allowed_keys: Collection[str] | None
) -> FoundCall | None:
    """The call that an object's members make, UNDECIDED_CALL as long as it is none yet.

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
    return UNDECIDED_CALL


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
