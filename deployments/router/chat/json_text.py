"""JSON of which only the beginning may have come: where its values stand, not what they mean.

What is said of a text holds for whatever may follow it.
"""

import re
from dataclasses import dataclass, field

_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_MARKS = re.compile(rf"{_STRING.pattern}|[^\s\w+.,:-]", re.DOTALL)
"""Strings, brackets, and what cannot stand outside of strings: a quote of a string without an end
too."""
_SPACE = re.compile(r"\s*")
_SCALAR = re.compile(r"[\w+.-]*")
_OPENING, _CLOSING = "{[", "}]"


@dataclass(frozen=True, slots=True)
class Span:
    """Where a value stands."""

    start: int
    end: int | None
    """Where the value ends; None while it may go on."""


@dataclass(slots=True, kw_only=True)
class Members:
    """The members of an object, as far as they have come."""

    values: dict[str, Span] = field(default_factory=dict)
    """Where the value of each key stands; keys are as they are written, escapes and all."""
    end: int | None = None
    """Where the object, or what is JSON of it, has ended; None while it may go on."""
    is_whole: bool = False
    """Whether the object has ended with its closing bracket."""


def skip_space(text: str, start: int) -> int:
    """The position of the next character that is no space; the text's length if there is none."""
    found = _SPACE.match(text, start)
    assert found is not None
    return found.end()


def find_end(text: str, start: int) -> int | None:
    """Where the value ends that begins at `start`; None while it may go on.

    A value that holds what cannot stand there ends before that.
    """
    if text[start] == '"':
        string = _STRING.match(text, start)
        return None if string is None else string.end()
    if text[start] not in _OPENING:
        scalar = _SCALAR.match(text, start)
        assert scalar is not None
        return None if scalar.end() == len(text) else scalar.end()
    depth = 0
    for found in _MARKS.finditer(text, start):
        mark = found[0]
        if mark in _OPENING:
            depth += 1
        elif mark in _CLOSING:
            depth -= 1
            if depth == 0:
                return found.end()
        elif mark == '"':
            return None
        elif len(mark) == 1:
            return found.start()
    return None


def read_members(text: str, start: int) -> Members:
    """The members of the object whose bracket stands at `start`; of two with a key, the first."""
    members = Members()
    position = skip_space(text, start + 1)
    if text.startswith("}", position):
        return _ended(members, position + 1, is_whole=True)
    while True:
        key = _STRING.match(text, position)
        if key is None:
            is_unfinished = text.startswith('"', position) or position == len(text)
            return members if is_unfinished else _ended(members, position)
        colon = skip_space(text, key.end())
        value = skip_space(text, colon + 1)
        if not text.startswith(":", colon) or value >= len(text):
            return members if colon >= len(text) or text[colon] == ":" else _ended(members, colon)
        end = find_end(text, value)
        if end == value:  # no value begins so
            return _ended(members, value)
        members.values.setdefault(key[0][1:-1], Span(value, end))
        if end is None:
            return members
        position = skip_space(text, end)
        if text.startswith("}", position):
            return _ended(members, position + 1, is_whole=True)
        if not text.startswith(",", position):
            return members if position == len(text) else _ended(members, position)
        position = skip_space(text, position + 1)


def _ended(members: Members, end: int, *, is_whole: bool = False) -> Members:
    members.end, members.is_whole = end, is_whole
    return members
