"""What is wrong with options, in one sentence: pydantic's errors in the words of a user."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

MAX_VALUE_LENGTH = 80
MAX_SENTENCE_LENGTH = 500
# What pydantic calls members of a union, and the parts of a value that is no option by itself.
_WORDS = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "a text",
}
NO_NAMES: Mapping[str, str] = {}


def nearest(
    name: str, known: Iterable[str], *, elsewhere: Mapping[str, str] = NO_NAMES
) -> str | None:
    """The known name that is meant by one that is not known; None if none is like it.

    Args:
        elsewhere: what other programs call a known name, in small letters, and that name.
    """
    name = name.lower()
    near = difflib.get_close_matches(name, list(known), n=1)
    return elsewhere.get(name) or (near[0] if near else None)


def near_or_all(name: str, known: Iterable[str]) -> str:
    """What to write in place of a name that is not known: the nearest one, or any of them."""
    near = nearest(name, known)
    return f"did you mean {near!r}?" if near else f"there are {', '.join(known)}"


def refuse_unknown(
    given: Iterable[object],
    known: Iterable[str],
    *,
    what: str,
    hint_of: Callable[[str, Iterable[str]], str] = near_or_all,
) -> None:
    """Raise ValueError for a name that is not known, with what to write in its place.

    Args:
        what: the names are of, in one word.
        hint_of: what is said of a name, given those that are known; by default the nearest of
            them, or all.
    """
    names = sorted(known)
    for name in given:
        if name not in names:
            raise ValueError(f"there is no {what} {str(name)!r}; {hint_of(str(name), names)}")


def option_sentence(errors: Sequence[Any]) -> str:
    """A sentence about the first option that is wrong: its name, its value, what it may be.

    Args:
        errors: of one pydantic ValidationError, at least one. A value that fits no member of a
            union has an error for each.
    """
    first = errors[0]
    if not first["loc"]:
        return _message(first)
    name = str(first["loc"][0])
    same = [error for error in errors if error["loc"][:1] == first["loc"][:1]]
    for error in same:
        if error["type"] == "value_error":
            return _named(name, _message(error))
    wanted = list(dict.fromkeys(_wanted(error) for error in same))
    # a number out of range was meant as a number: that it is none of the words is no news
    in_range = [words for words in wanted if words.startswith(("at ", "above", "below"))]
    return f"{name} is {_shown(first['input'])}; it must be {' or '.join(in_range or wanted)}"


def _named(name: str, message: str) -> str:
    return message if name in message else f"{name}: {message}"


def _message(error: Any) -> str:
    text = str(error["msg"]).removeprefix("Value error, ")
    return _shortened(text, MAX_SENTENCE_LENGTH)


def _wanted(error: Any) -> str:
    limits = error.get("ctx", {})
    match error["type"]:
        case "greater_than_equal":
            return f"at least {limits['ge']}"
        case "greater_than":
            return f"above {limits['gt']:g}"
        case "less_than_equal":
            return f"at most {limits['le']:g}"
        case "multiple_of":
            return f"a multiple of {limits['multiple_of']:g}"
        case "literal_error" | "enum":
            return str(limits["expected"])
        case "string_too_short":
            return "a text that is not empty"
        case "string_pattern_mismatch":
            return "'auto', 'cpu' or 'cuda'"  # the only option with a pattern is `device`
        case kind:
            return _WORDS.get(kind, f"otherwise ({_message(error)})")


def _shown(value: Any) -> str:
    return _shortened(repr(value), MAX_VALUE_LENGTH)


def _shortened(text: str, max_length: int) -> str:
    """The text, or its two ends: a message that begins with a value ends with what to do."""
    if len(text) <= max_length:
        return text
    half = (max_length - 3) // 2
    return f"{text[:half]}...{text[-half:]}"
