"""What a field's definition says beside its type and limits, for the proto and the docs."""

from dataclasses import dataclass
from typing import TypeVar

from pydantic.fields import FieldInfo

MarkT = TypeVar("MarkT")


@dataclass(frozen=True, slots=True)
class Grpc:
    """A field's number in GenerateRequest of `tandem.proto`; it may never change."""

    number: int


@dataclass(frozen=True, slots=True)
class Takes:
    """A field's values in words, where its type and limits do not say it all."""

    words: str


def mark(field: FieldInfo, kind: type[MarkT]) -> MarkT | None:
    """The field's mark of a kind; None if it has none."""
    return next((found for found in field.metadata if isinstance(found, kind)), None)
