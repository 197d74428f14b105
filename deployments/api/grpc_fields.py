"""The fields of HTTP's requests that gRPC has too: which these are, and what a client has set."""

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deployments.api.marks import Grpc, mark


def marked_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields that have a number in `tandem.proto`."""
    return {name: field for name, field in model.model_fields.items() if mark(field, Grpc)}


def given_fields(request: Message, model: type[BaseModel]) -> dict[str, Any]:
    """The fields of a model that the client has set, as JSON has them."""
    marked = marked_fields(model)
    return {
        descriptor.name: plain(value)
        for descriptor, value in request.ListFields()
        if descriptor.name in marked
    }


def plain(value: Any) -> Any:
    """A value of protobuf as JSON has it; of a message, what has been set."""
    if isinstance(value, Message):
        return {descriptor.name: plain(inner) for descriptor, inner in value.ListFields()}
    if isinstance(value, Mapping):
        return dict(value)
    return value if isinstance(value, str | int | float) else [plain(item) for item in value]
