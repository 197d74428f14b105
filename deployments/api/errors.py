"""The HTTP status and the gRPC code of each of our errors: one table each."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from workers.errors import (
    AuthenticationError,
    ContextLengthError,
    InvalidRequestError,
    ModelNameError,
    OverloadedError,
    QueueTimeoutError,
    RateLimitError,
    RequestTimeoutError,
    RequestTooLargeError,
    TandemError,
    TargetUnavailableError,
)

MAX_TOLD_LEN = 1000
"""Characters of a message, beyond which a client's own words would come back to it in full."""


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """OpenAI's error object."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpError:
    status: int
    type: str
    code: str | None = None


# The first class that matches counts, so the more special ones come first.
HTTP_ERRORS: tuple[tuple[type[TandemError], HttpError], ...] = (
    (
        ModelNameError,
        HttpError(status=404, type="invalid_request_error", code="model_not_found"),
    ),
    (
        ContextLengthError,
        HttpError(status=400, type="invalid_request_error", code="context_length_exceeded"),
    ),
    (
        RequestTooLargeError,
        HttpError(status=413, type="invalid_request_error", code="request_too_large"),
    ),
    (InvalidRequestError, HttpError(status=400, type="invalid_request_error")),
    (RequestTimeoutError, HttpError(status=408, type="timeout_error", code="timeout")),
    (
        AuthenticationError,
        HttpError(status=401, type="invalid_request_error", code="invalid_api_key"),
    ),
    (
        RateLimitError,
        HttpError(status=429, type="rate_limit_error", code="rate_limit_exceeded"),
    ),
    (QueueTimeoutError, HttpError(status=503, type="server_error", code="queue_timeout")),
    (OverloadedError, HttpError(status=429, type="rate_limit_error", code="overloaded")),
    (TargetUnavailableError, HttpError(status=503, type="server_error", code="unavailable")),
    (TandemError, HttpError(status=500, type="server_error")),
)

GRPC_CODES: tuple[tuple[type[TandemError], grpc.StatusCode], ...] = (
    (ModelNameError, grpc.StatusCode.NOT_FOUND),
    (InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (RequestTimeoutError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (AuthenticationError, grpc.StatusCode.UNAUTHENTICATED),
    (QueueTimeoutError, grpc.StatusCode.UNAVAILABLE),
    (OverloadedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (TargetUnavailableError, grpc.StatusCode.UNAVAILABLE),
    (TandemError, grpc.StatusCode.INTERNAL),
)


ERROR_RESPONSES: Mapping[int | str, dict[str, Any]] = {
    entry.status: {"model": ErrorBody} for _, entry in HTTP_ERRORS
}
"""The answers of a route other than 200, for the OpenAPI schema."""


def http_error(error: TandemError) -> HttpError:
    return next(entry for kind, entry in HTTP_ERRORS if isinstance(error, kind))


def grpc_code(error: TandemError) -> grpc.StatusCode:
    return next(code for kind, code in GRPC_CODES if isinstance(error, kind))


def error_body(error: TandemError) -> ErrorBody:
    entry = http_error(error)
    return ErrorBody(
        error=ErrorDetail(
            message=told(str(error)),
            type=entry.type,
            param=_param(error),
            code=entry.code,
        )
    )


def told(text: str) -> str:
    """A text as clients are told it: what it repeats of their request is bounded."""
    text = sendable(text)
    return text if len(text) <= MAX_TOLD_LEN else f"{text[:MAX_TOLD_LEN]}..."


def sendable(text: str) -> str:
    """The text with halves of surrogate pairs, which are no characters, spelt out.

    Clients can write them in JSON, and errors quote what clients write.
    """
    return text.encode(errors="backslashreplace").decode()


def _param(error: TandemError) -> str | None:
    field = error.field if isinstance(error, InvalidRequestError) else None
    return None if field is None else told(field)


def error_response(error: TandemError) -> JSONResponse:
    """The whole answer to a request that failed before its answer began."""
    return JSONResponse(
        error_body(error).model_dump(),
        status_code=http_error(error).status,
        headers=_headers(error),
    )


def _headers(error: TandemError) -> dict[str, str]:
    if isinstance(error, AuthenticationError):
        return {"www-authenticate": "Bearer"}
    return retry_metadata(error)


def retry_metadata(error: TandemError) -> dict[str, str]:
    """When a request may come back: headers of HTTP, and metadata of gRPC; empty if never."""
    if not isinstance(error, OverloadedError):
        return {}
    return {
        "retry-after": str(math.ceil(error.retry_after_s)),
        "retry-after-ms": str(math.ceil(error.retry_after_s * 1000)),  # OpenAI's clients ask it
    }
