"""Texts that OpenAI's clients may send in parts."""

from typing import Any, Literal

from deployments.api.validation import RequestModel, brief


class TextPart(RequestModel):
    """A part of a text, for the schema."""

    type: Literal["text"]
    text: str


def joined(value: Any, *, by: str) -> Any:
    """A text whose parts are joined `by` something; raises ValueError for what is no part."""
    if not isinstance(value, list):
        return value
    return by.join(_text_of_part(index, part) for index, part in enumerate(value))


def _text_of_part(index: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal"):
        raise ValueError(
            f"part {index} has the type {brief(kind)}; only parts of the type 'text' are served"
            if isinstance(part, dict)
            else f'part {index} is {brief(part)}; it must be like {{"type": "text", "text": "..."}}'
        )
    text = part.get(kind)
    if not isinstance(text, str):
        raise ValueError(f"part {index} has the {kind} {brief(text)}; it must be a string")
    return text
