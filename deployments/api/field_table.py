"""The fields of a request in rows, for the tables of the docs."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from annotated_types import MaxLen
from pydantic.fields import FieldInfo

from deployments.api.marks import Takes, mark
from deployments.api.validation import RequestModel, kinds_of, number_words

REQUIRED = "required"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRow:
    """One field of a request, for a table of the docs."""

    name: str
    takes: str
    """The values that the field takes, in words."""
    default: str
    """The default in JSON; REQUIRED where there is none, empty where the field is then absent, or
    the object that has to have it may be."""
    meaning: str


def rows(model: type[RequestModel]) -> list[FieldRow]:
    """All fields that a request may have, required ones first; nested ones by their path."""
    found = list(_rows(model))
    return sorted(found, key=lambda row: row.default != REQUIRED)


def _rows(model: type[RequestModel], prefix: str = "") -> Iterator[FieldRow]:
    for name, field in model.model_fields.items():
        nested = next((kind for kind in kinds_of(field) if _is_request_model(kind)), None)
        if nested is not None:
            for row in _rows(nested, f"{name}."):
                is_needed = row.default != REQUIRED or field.is_required()
                yield row if is_needed else replace(row, default="")
            continue
        yield FieldRow(
            name=prefix + name,
            takes=_takes(field),
            default=_default(field),
            meaning=field.description or "",
        )


def _takes(field: FieldInfo) -> str:
    kinds = kinds_of(field)
    if (words := mark(field, Takes)) is not None:
        return words.words
    if bool in kinds:
        return "true or false"
    if str in kinds:
        limit = mark(field, MaxLen)
        return "a string" + (f" of at most {limit.max_length} characters" if limit else "")
    return number_words(field)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return REQUIRED
    default = field.get_default(call_default_factory=True)
    return "" if default is None else json.dumps(default)


def _is_request_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, RequestModel)
