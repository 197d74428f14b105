"""How each of our errors looks on the wire: one table for HTTP, one for gRPC."""

from dataclasses import dataclass

import grpc

from deployments.api.openai import ErrorBody, ErrorDetail
from workers.errors import (
    ContextLengthError,
    InvalidRequestError,
    ModelNameError,
    OverloadedError,
    TandemError,
    TargetUnavailableError,
)


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
    (InvalidRequestError, HttpError(status=400, type="invalid_request_error")),
    (OverloadedError, HttpError(status=429, type="rate_limit_error", code="overloaded")),
    (TargetUnavailableError, HttpError(status=503, type="server_error", code="unavailable")),
    (TandemError, HttpError(status=500, type="server_error")),
)

GRPC_CODES: tuple[tuple[type[TandemError], grpc.StatusCode], ...] = (
    (ModelNameError, grpc.StatusCode.NOT_FOUND),
    (InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (OverloadedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (TargetUnavailableError, grpc.StatusCode.UNAVAILABLE),
    (TandemError, grpc.StatusCode.INTERNAL),
)


def http_error(error: TandemError) -> HttpError:
    return next(entry for kind, entry in HTTP_ERRORS if isinstance(error, kind))


def grpc_code(error: TandemError) -> grpc.StatusCode:
    return next(code for kind, code in GRPC_CODES if isinstance(error, kind))


def error_body(error: TandemError) -> ErrorBody:
    """OpenAI's error object."""
    entry = http_error(error)
    return ErrorBody(
        error=ErrorDetail(
            message=str(error),
            type=entry.type,
            param=error.field if isinstance(error, InvalidRequestError) else None,
            code=entry.code,
        )
    )


def http_headers(error: TandemError) -> dict[str, str]:
    if isinstance(error, OverloadedError):
        return {"Retry-After": str(error.retry_after_s)}
    return {}
