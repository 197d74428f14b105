"""Checking requests, and what a client is told of a wrong one: the field, the value, the limit."""

import reprlib
from collections.abc import Collection, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from deployments.api.errors import sendable
from deployments.api.unserved import UnservedFields, near_miss
from workers.errors import InvalidRequestError

# Locations that pydantic adds and a client never wrote: the part of the request, union members.
_PSEUDO_LOCATIONS = frozenset({"body"})

_NUMBER_ERRORS = frozenset(
    {
        "int_type", "int_from_float", "int_parsing", "int_parsing_size", "float_type",
        "float_parsing", "finite_number", "greater_than", "greater_than_equal", "less_than",
        "less_than_equal",
    }
)  # fmt: skip
"""Pydantic's error types of a number; the field's own range is what answers them all."""

_SENTENCES: Mapping[str, str] = {
    "bool_type": "it must be true or false",
    "dict_type": "it must be an object",
    "finite_number": "it must be a finite number",
    "float_type": "it must be a number",
    "greater_than": "it must be more than {gt}",
    "greater_than_equal": "it must be at least {ge}",
    "int_from_float": "it must be an integer",
    "int_type": "it must be an integer",
    "less_than": "it must be less than {lt}",
    "less_than_equal": "it must be at most {le}",
    "list_type": "it must be a list",
    "literal_error": "it must be {expected}",
    "model_attributes_type": "it must be an object",
    "model_type": "it must be an object",
    "string_too_long": "it must have at most {max_length} characters",
    "string_too_short": "it is empty; leave it out instead",
    "string_type": "it must be a string",
    "string_unicode": "it has half of a surrogate pair, which is no character",
    "too_long": "it must have at most {max_length} items",
    "too_short": "it must have at least {min_length} items",
}
"""Pydantic's error types in words for a client; `{}` are pydantic's own limits."""


class _Brief(reprlib.Repr):
    """Bounded text, with the words of JSON for the values that Python calls otherwise."""

    def repr_bool(self, value: bool, level: int) -> str:  # noqa: ARG002
        return "true" if value else "false"

    def repr_NoneType(self, value: None, level: int) -> str:  # noqa: ARG002
        return "null"


_repr = _Brief()
_repr.maxstring = _repr.maxother = 80
_repr.maxlong = 40
brief = _repr.repr
"""Shows a value that a client sent, as text of bounded length."""


MAX_UNKNOWN_FIELDS = 32


class RequestModel(BaseModel):
    """A JSON object of a request.

    `null` means a field's default, and an integer may be written like `2.0`. Fields that are known
    but not served may be there as long as they ask for nothing, and others as long as they are not
    a known one misspelt.
    """

    model_config = ConfigDict(extra="ignore", strict=True)
    is_ours_alone: ClassVar[bool] = False
    """Whether no other server has such an object: then no unknown field may be there."""

    @classmethod
    def unserved_fields(cls) -> UnservedFields:
        """Fields that are known but not served."""
        return {}

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        known = {*cls.model_fields, *cls.unserved_fields()}
        unknown = [name for name in values if name not in known]
        _check_unknown(unknown, known)
        if unknown and cls.is_ours_alone:
            raise field_error(unknown[0], f"{unknown[0]} is unknown here; there is {_fields(cls)}")
        return {
            name: cls._as_written(name, value)
            for name, value in values.items()
            if cls._is_given(name, value)
        }

    @classmethod
    def _as_written(cls, name: str, value: Any) -> Any:
        """The value, as an integer where the field is one: JSON does not tell `2.0` from `2`."""
        if isinstance(value, float) and value.is_integer():
            kinds = kinds_of(cls.model_fields[name])
            return int(value) if int in kinds and float not in kinds else value
        return value

    @classmethod
    def _is_given(cls, name: str, value: Any) -> bool:
        """True if a field has something to say; raises for one that is not served and does."""
        field = cls.model_fields.get(name)
        if field is not None:
            return value is not None or field.is_required()
        unserved = cls.unserved_fields().get(name)
        if unserved is not None and not unserved.asks_for_nothing(value):
            raise field_error(
                name, f"{name} is {brief(value)}: it is not served yet; {unserved.advice()}"
            )
        return False


def _check_unknown(names: Sequence[str], known: Collection[str]) -> None:
    """Raise for fields that nobody knows where one looks like a known one, or there are many."""
    if len(names) > MAX_UNKNOWN_FIELDS:
        raise field_error(
            names[0],
            f"the request has {len(names)} fields that are unknown here, such as "
            f"{brief(names[0])}; at most {MAX_UNKNOWN_FIELDS} are left out",
        )
    for name in names:
        if (near := near_miss(name, known)) is not None:
            raise field_error(
                name, f"there is no field {name!r} in this request; did you mean {near!r}?"
            )


def _fields(model: type[BaseModel]) -> str:
    """The names of an object's fields, as "a, b and c"."""
    *names, last = model.model_fields
    return f"{', '.join(names)} and {last}" if names else last


def field_error(field: str, message: str) -> PydanticCustomError:
    """The error of one field, for a validator that sees the whole object."""
    context = {"field": sendable(field), "message": sendable(message)}
    return PydanticCustomError("field", "{message}", context)


def check_text(text: str) -> str:
    """The text, if it is one; raises ValueError for half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"its character {error.start} is half of a surrogate pair, which is no character"
        ) from None
    return text


def invalid_request(
    errors: Sequence[Any], model: type[BaseModel] | None = None
) -> InvalidRequestError:
    """The first of pydantic's errors, in the client's words; `model` is what was validated."""
    first = errors[0]
    location = [str(part) for part in first["loc"] if part not in _PSEUDO_LOCATIONS]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", message)
        position = f" at character {location[0]}" if location else ""
        return InvalidRequestError(f"the body is not valid JSON: {reason}{position}")
    if first["type"] == "field":
        field = ".".join([*location, first["ctx"]["field"]])
        return InvalidRequestError(message, field=field)
    field = sendable(".".join(location))
    if not field:
        fault = "the body is empty; it" if first["type"] == "missing" else "the body"
        return InvalidRequestError(
            f"{fault} must be a JSON object, sent with the header Content-Type: application/json"
        )
    if first["type"] == "missing":
        return InvalidRequestError(f"{field} is missing; it is required", field=field)
    reason = _reason(first, model, location) or message
    return InvalidRequestError(f"{field} is {brief(first['input'])}: {reason}", field=field)


def unreadable_body(cause: BaseException | None) -> InvalidRequestError:
    """The error for a body that is no JSON for another reason than its syntax; `cause` is what
    reading it raised."""
    match cause:
        case UnicodeDecodeError():
            reason = "it is not UTF-8; compressed bodies are not taken"
        case RecursionError():
            reason = "it is nested too deeply"
        case ValueError():
            reason = "it has a number of too many digits"
        case _:
            reason = "it is no JSON"
    return InvalidRequestError(f"the body cannot be read: {reason}")


ModelT = TypeVar("ModelT", bound=BaseModel)


def parse(model: type[ModelT], values: dict[str, Any]) -> ModelT:
    """Validate values that did not come as JSON; raises InvalidRequestError."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise invalid_request(error.errors(), model) from None


def _reason(error: Any, model: type[BaseModel] | None, location: list[str]) -> str | None:
    kind = error["type"]
    field = None
    if model is not None and len(location) == 1:
        field = model.model_fields.get(location[0])
    if field is not None and kind in _NUMBER_ERRORS:
        return f"it must be {number_words(field)}"
    if field is not None and kind in ("model_type", "model_attributes_type"):
        models = [each for each in kinds_of(field) if issubclass(each, BaseModel)]
        return f"it must be an object, with {_fields(models[0])}"
    sentence = _SENTENCES.get(kind)
    return None if sentence is None else sentence.format(**error.get("ctx", {}))


def kinds_of(field: FieldInfo) -> set[Any]:
    """The types of which a field takes values: one, or the members of a union; not annotated."""
    is_union = get_origin(field.annotation) in (Union, UnionType)
    kinds = get_args(field.annotation) if is_union else (field.annotation,)
    return {get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds}


def number_words(field: FieldInfo) -> str:
    """The values of a numeric field in words, like "a number from 0 to 2"."""
    kind = "an integer" if int in kinds_of(field) else "a number"
    limits = {
        name: getattr(limit, name)
        for limit in field.metadata
        for name in ("ge", "gt", "le", "lt")
        if getattr(limit, name, None) is not None
    }
    match limits:
        case {"ge": low, "le": high}:
            return f"{kind} from {low} to {high}"
        case {"gt": low, "le": high}:
            return f"{kind} above {low} and at most {high}"
        case {"ge": low}:
            return f"{kind} of at least {low}"
        case _:
            return kind
