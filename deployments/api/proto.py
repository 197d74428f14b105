"""What `tandem.proto` has of the fields of requests, written from their definition.

`make proto` runs this module before protoc. Each message that BEGIN stands in gets all fields of
GenerationFields; the messages that these are made of stand at the end of the file, below NESTED.
"""

import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deployments.api.fields import GenerationFields
from deployments.api.marks import Grpc, mark
from deployments.api.validation import RequestModel

PATH = Path(__file__).parent / "tandem.proto"
BEGIN = "  // The fields from here on are written by `make proto`, from fields.py.\n"
END = "}\n"
NESTED = "// The messages from here on are written by `make proto`, from fields.py.\n"
LINE_LENGTH = 100
SCALARS = {bool: "bool", float: "double", int: "int32", str: "string"}


def with_fields(proto: str, model: type[RequestModel] = GenerationFields) -> str:
    """The text of `tandem.proto` with the requests' fields as the model has them now."""
    assert BEGIN in proto, f"{PATH} has lost the line {BEGIN!r}"
    head, *parts = proto.partition(NESTED)[0].rstrip("\n").split(BEGIN)
    fields = "".join(_fields(model))
    text = head + "".join(BEGIN + fields + part[part.index(END) :] for part in parts)
    nested = "".join(_messages(model))
    return f"{text}\n" + (f"\n{NESTED}{nested}" if nested else "")


def _fields(model: type[BaseModel]) -> Iterator[str]:
    for name, field in _marked(model):
        number = mark(field, Grpc)
        assert number is not None
        words = field.description or ""
        yield from (f"  // {line}\n" for line in textwrap.wrap(words, LINE_LENGTH - len("  // ")))
        yield f"  {_type(field)} {name} = {number.number};\n"


def _messages(model: type[BaseModel]) -> Iterator[str]:
    """The messages of fields that are objects, each before those in it."""
    for _, field in _marked(model):
        kind = _item_kind(field.annotation)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield f"\nmessage {kind.__name__} {{\n{''.join(_fields(kind))}}}\n"
            yield from _messages(kind)


def _marked(model: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    """The fields that gRPC has."""
    return [(name, field) for name, field in model.model_fields.items() if mark(field, Grpc)]


def _type(field: FieldInfo) -> str:
    kind = _kind(field.annotation)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is list:
        return f"repeated {_name(arguments[0])}"
    if origin is dict:
        return f"map<{', '.join(map(_name, arguments))}>"
    if any(getattr(limit, "le", 0) >= 2**31 for limit in field.metadata):
        return "optional int64"
    return f"optional {_name(kind)}"


def _item_kind(annotation: Any) -> Any:
    """The type of a field's value, or of the items in its list."""
    kind = _kind(annotation)
    return _kind(get_args(kind)[0]) if get_origin(kind) is list else kind


def _kind(annotation: Any) -> Any:
    """A type without what is said about it, and without None; of several, the scalar one."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin in (Union, UnionType):
        kinds = [_kind(argument) for argument in arguments if argument is not type(None)]
        return next((kind for kind in kinds if kind in SCALARS), kinds[0])
    return annotation


def _name(annotation: Any) -> str:
    """The proto's name of a type: a scalar, or a message of its own."""
    kind = _kind(annotation)
    if get_origin(kind) is Literal:  # the words that it may be are checked as over HTTP
        (kind,) = {type(value) for value in get_args(kind)}
    return SCALARS[kind] if kind in SCALARS else str(kind.__name__)


if __name__ == "__main__":
    PATH.write_text(with_fields(PATH.read_text()))
