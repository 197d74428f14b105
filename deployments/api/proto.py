"""The fields of `GenerateRequest` in `tandem.proto`, written from their definition.

`make proto` runs this module before protoc.
"""

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_origin

from pydantic.fields import FieldInfo

from deployments.api.fields import GenerationFields, Grpc, mark
from deployments.api.validation import kinds_of

PATH = Path(__file__).parent / "tandem.proto"
BEGIN = "  // The fields from here on are written by `make proto`, from fields.py.\n"
END = "}\n"
LINE_LENGTH = 100
SCALARS = {bool: "bool", float: "double", int: "int32", str: "string"}


def with_fields(proto: str) -> str:
    """The text of `tandem.proto` with the request's fields as GenerationFields has them now."""
    before, begin, rest = proto.partition(BEGIN)
    assert begin, f"{PATH} has lost the line {BEGIN!r}"
    return before + begin + "".join(_fields()) + rest[rest.index(END) :]


def _fields() -> Iterator[str]:
    for name, field in GenerationFields.model_fields.items():
        number = mark(field, Grpc)
        if number is None:
            continue
        comment = textwrap.wrap(field.description or "", LINE_LENGTH - len("  // "))
        yield from (f"  // {line}\n" for line in comment)
        yield f"  {_type(field)} {name} = {number.number};\n"


def _type(field: FieldInfo) -> str:
    origin, arguments = get_origin(field.annotation), get_args(field.annotation)
    if origin is list:
        return f"repeated {_scalar(arguments[0])}"
    if origin is dict:
        return f"map<{', '.join(map(_scalar, arguments))}>"
    if any(getattr(limit, "le", 0) >= 2**31 for limit in field.metadata):
        return "optional int64"
    (kind,) = kinds_of(field) & SCALARS.keys()
    return f"optional {SCALARS[kind]}"


def _scalar(annotation: object) -> str:
    """The proto's name of a type that may be annotated."""
    kind, *_ = get_args(annotation) or (annotation,)
    return SCALARS[kind]


if __name__ == "__main__":
    PATH.write_text(with_fields(PATH.read_text()))
