"""What `tandem.proto` has of the fields of requests, written from their definition.

`make proto` runs this module before protoc. A line like BEGIN stands in each message that gets the
fields of a request of HTTP's, below those that gRPC has in a way of its own. The messages that
fields are made of stand at the end of the file, below NESTED.
"""

import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deployments.api.chat import ChatCompletionRequest
from deployments.api.completions import CompletionRequest
from deployments.api.grpc_fields import marked_fields
from deployments.api.marks import Grpc, mark
from deployments.api.validation import RequestModel

PATH = Path(__file__).parent / "tandem.proto"
REQUESTS: tuple[type[RequestModel], ...] = (CompletionRequest, ChatCompletionRequest)
"""The requests whose fields the proto has."""
BEGIN = "  // The fields from here on are written by `make proto`, from {}.\n"
END = "}\n"
NESTED = "// The messages from here on are written by `make proto`.\n"
LINE_LENGTH = 100
SCALARS = {bool: "bool", float: "double", int: "int32", str: "string"}


def with_fields(proto: str, requests: Sequence[type[RequestModel]] = REQUESTS) -> str:
    """The text of `tandem.proto` with the requests' fields as they are defined now."""
    by_name = {request.__name__: request for request in requests}
    head, *parts = re.split(BEGIN.format(r"(\w+)"), proto.partition(NESTED)[0].rstrip("\n"))
    assert parts[::2] == list(by_name), f"{PATH} has fields of {parts[::2]}, not {list(by_name)}"
    text = head
    for name, part in zip(parts[::2], parts[1::2], strict=True):
        fields = "".join(_fields(by_name[name]))
        text += BEGIN.format(name) + fields + part[part.index(END) :]
    nested = {message: None for request in requests for message in _messages(request)}
    return f"{text}\n" + (f"\n{NESTED}{''.join(nested)}" if nested else "")


def _fields(model: type[BaseModel]) -> Iterator[str]:
    for name, field in marked_fields(model).items():
        number = mark(field, Grpc)
        assert number is not None
        words = field.description or ""
        yield from (f"  // {line}\n" for line in textwrap.wrap(words, LINE_LENGTH - len("  // ")))
        yield f"  {_type(field)} {name} = {number.number};\n"


def _messages(model: type[BaseModel]) -> Iterator[str]:
    """The messages of fields that are objects, each before those in it."""
    for field in marked_fields(model).values():
        kind = _item_kind(field.annotation)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield f"\nmessage {kind.__name__} {{\n{''.join(_fields(kind))}}}\n"
            yield from _messages(kind)


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
