"""The gRPC methods `tandem.v1.Generation`: the same service, in protobuf.

Requests become the HTTP request's model, so that both are validated in one place.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Protocol

import grpc

from deployments.api import tandem_pb2
from deployments.api.errors import grpc_code, internal_error, told
from deployments.api.openai import CompletionRequest
from deployments.api.validation import parse
from deployments.router.service import Generation, GenerationService
from workers.errors import InvalidRequestError, RequestTooLargeError, TandemError

logger = logging.getLogger(__name__)

_OPTIONAL_FIELDS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "ignore_eos",
    "cache_salt",
)


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
            response.id, response.model = generation.id, service.model.name
            async with aclosing(service.run(generation)) as deltas:
                async for _, delta in deltas:
                    response.text += delta.text
                    response.token_ids.extend(delta.token_ids)
                    response.finish_reason = delta.finish_reason or ""
            response.usage.CopyFrom(_usage(generation))
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
            aclosing(service.run(generation)) as deltas,
        ):
            async for _, delta in deltas:
                yield tandem_pb2.GenerateChunk(
                    id=generation.id,
                    text=delta.text,
                    token_ids=delta.token_ids,
                    finish_reason=delta.finish_reason or "",
                    usage=_usage(generation) if delta.finish_reason else None,
                )
    except Exception as error:
        raise _set_status(context, error) from None


def _parse(
    service: GenerationService, request: tandem_pb2.GenerateRequest, max_request_bytes: int
) -> CompletionRequest:
    if (num_bytes := request.ByteSize()) > max_request_bytes:
        raise RequestTooLargeError(
            f"the request has {num_bytes} bytes; at most {max_request_bytes} are taken (the option "
            "max_request_bytes); send a shorter prompt"
        )
    prompt = request.WhichOneof("prompt")
    if prompt is None:
        raise InvalidRequestError("prompt is missing: set text or token_ids", field="prompt")
    values: dict[str, Any] = {
        "model": request.model or service.model.name,
        "prompt": request.text if prompt == "text" else list(request.token_ids.ids),
        "stop": list(request.stop),
        "logit_bias": dict(request.logit_bias),
    }
    for name in _OPTIONAL_FIELDS:
        if request.HasField(name):
            values[name] = getattr(request, name)
    parsed: CompletionRequest = parse(CompletionRequest, values)
    return parsed


def _usage(generation: Generation) -> tandem_pb2.Usage:
    counts = generation.counts
    return tandem_pb2.Usage(
        prompt_tokens=generation.num_prompt_tokens,
        completion_tokens=generation.num_completion_tokens,
        accepted_prediction_tokens=counts.num_accepted,
        rejected_prediction_tokens=counts.num_draft_tokens - counts.num_accepted,
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
