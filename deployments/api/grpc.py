"""The gRPC methods `tandem.v1.Generation`: the same service, in protobuf.

The fields of a request are checked as those of HTTP are, by GenerationFields.
"""

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from deployments.api import tandem_pb2
from deployments.api.errors import grpc_code, told
from deployments.api.fields import GenerationFields
from deployments.api.marks import Grpc, mark
from deployments.api.validation import parse
from deployments.router.generation import Generation
from deployments.router.request import GenerationRequest
from deployments.router.service import GenerationService
from workers.errors import (
    InvalidRequestError,
    RequestTooLargeError,
    TandemError,
    internal_error,
)

logger = logging.getLogger(__name__)


class StatusContext(Protocol):
    """The part of Serve's gRPC context that is used."""

    def set_code(self, code: grpc.StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...


async def generate(
    service: GenerationService,
    request: tandem_pb2.GenerateRequest,
    context: StatusContext,
    *,
    max_request_bytes: int,
) -> tandem_pb2.GenerateResponse:
    """The whole completion; a failure sets the status."""
    response = tandem_pb2.GenerateResponse()
    try:
        parsed = _parse(service, request, max_request_bytes)
        async with service.open(parsed) as generation:
            (completion,) = await generation.complete()
            response = tandem_pb2.GenerateResponse(
                id=_id(generation),
                model=service.model.name,
                text=completion.text,
                token_ids=completion.token_ids,
                finish_reason=completion.finish_reason,
                usage=_usage(generation),
            )
    except Exception as error:
        _set_status(context, error)
    return response


async def generate_stream(
    service: GenerationService,
    request: tandem_pb2.GenerateRequest,
    context: StatusContext,
    *,
    max_request_bytes: int,
) -> AsyncIterator[tandem_pb2.GenerateChunk]:
    """The completion, commit by commit; a failure sets the status and is raised, without which
    Serve would end the stream as if all were well."""
    try:
        parsed = _parse(service, request, max_request_bytes)
        async with (
            service.open(parsed) as generation,
            aclosing(generation.run()) as deltas,
        ):
            async for _, delta in deltas:
                yield tandem_pb2.GenerateChunk(
                    id=_id(generation),
                    text=delta.text,
                    token_ids=delta.token_ids,
                    finish_reason=delta.finish_reason or "",
                    usage=_usage(generation) if delta.finish_reason else None,
                )
    except Exception as error:
        raise _set_status(context, error) from None


def _parse(
    service: GenerationService, request: tandem_pb2.GenerateRequest, max_request_bytes: int
) -> GenerationRequest:
    if (num_bytes := request.ByteSize()) > max_request_bytes:
        raise RequestTooLargeError(
            f"the request has {num_bytes} bytes; at most {max_request_bytes} are taken (the option "
            "max_request_bytes); send a shorter prompt"
        )
    prompt = request.WhichOneof("prompt")
    if prompt is None:
        raise InvalidRequestError("prompt is missing: set text or token_ids", field="prompt")
    return parse(GenerationFields, _given(request)).to_request(
        model=request.model or service.model.name,
        prompts=[request.text if prompt == "text" else tuple(request.token_ids.ids)],
    )


def _given(request: tandem_pb2.GenerateRequest) -> dict[str, Any]:
    """The fields that the client has set, as JSON would have them."""
    numbers = {
        field_mark.number
        for field in GenerationFields.model_fields.values()
        if (field_mark := mark(field, Grpc)) is not None
    }
    return {
        descriptor.name: _plain(value)
        for descriptor, value in request.ListFields()
        if descriptor.number in numbers
    }


def _plain(value: Any) -> Any:
    """A value of protobuf as Python's own."""
    if isinstance(value, Message):
        return {descriptor.name: _plain(inner) for descriptor, inner in value.ListFields()}
    if isinstance(value, Mapping):
        return dict(value)
    return value if isinstance(value, str | int | float) else list(value)


def _id(generation: Generation) -> str:
    return f"cmpl-{generation.id}"


def _usage(generation: Generation) -> tandem_pb2.Usage:
    usage = generation.usage
    return tandem_pb2.Usage(
        prompt_tokens=usage.num_prompt_tokens,
        completion_tokens=usage.num_completion_tokens,
        accepted_prediction_tokens=usage.num_accepted,
        rejected_prediction_tokens=usage.num_rejected,
    )


def _set_status(context: StatusContext, error: Exception) -> TandemError:
    """Give a failure its code and message; without a code, Serve would send its traceback.

    Returns the error to raise, if one has to be raised.
    """
    if not isinstance(error, TandemError):
        logger.exception("a request failed", exc_info=error)
        error = internal_error()
    context.set_code(grpc_code(error))
    context.set_details(told(str(error)))
    return error
