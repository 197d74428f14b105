"""What a pydantic error says to a client: the field, the value, the limit."""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from workers.errors import InvalidRequestError

MAX_VALUE_LENGTH = 80
# Locations that pydantic adds and a client never wrote: the part of the request, union members.
_PSEUDO_LOCATIONS = frozenset({"body"})


def invalid_request(errors: Sequence[Any]) -> InvalidRequestError:
    """The first of pydantic's errors, in the client's words."""
    first = errors[0]
    location = [str(part) for part in first["loc"] if part not in _PSEUDO_LOCATIONS]
    field = ".".join(location) or None
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return InvalidRequestError(f"{field} is missing; it is required", field=field)
    if first["type"] == "extra_forbidden":
        return InvalidRequestError(f"there is no field {field!r} in this request", field=field)
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", message)
        return InvalidRequestError(f"the body is not valid JSON: {reason}")
    if field is None:
        return InvalidRequestError(
            "the body must be a JSON object, sent with the header Content-Type: application/json"
        )
    return InvalidRequestError(f"{field} is {_shown(first['input'])}: {message}", field=field)


def parse(model: type[Any], values: dict[str, Any]) -> Any:
    """Validate values that did not come as JSON; raises InvalidRequestError."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise invalid_request(error.errors()) from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_VALUE_LENGTH else text[: MAX_VALUE_LENGTH - 3] + "..."
