"""`POST /v1/completions`: a request's completions as one answer, or as server-sent events."""

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from deployments.api.errors import error_body, internal_error
from deployments.api.openai import (
    Completion,
    CompletionChoice,
    CompletionRequest,
    CompletionTokensDetails,
    ErrorBody,
    StreamOptions,
    Usage,
)
from deployments.router.sequence import Delta
from deployments.router.service import Generation, GenerationService
from workers.errors import TandemError

logger = logging.getLogger(__name__)


async def whole(
    service: GenerationService, request: CompletionRequest, *, timeout_s: float | None
) -> Response:
    """The completions once they are finished."""
    async with service.open(request, timeout_s=timeout_s) as generation:
        texts = [""] * len(generation.choices)
        reasons: list[str | None] = [None] * len(generation.choices)
        async with aclosing(service.run(generation)) as deltas:
            async for index, delta in deltas:
                texts[index] += delta.text
                reasons[index] = delta.finish_reason
        choices = [
            CompletionChoice(index=index, text=text, finish_reason=reason)
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        body = _completion(service, generation, choices, usage=_usage(generation))
        return Response(body.model_dump_json(), media_type="application/json")


class EventStream(Response):
    """The completions as they are written.

    The request is admitted when the answer is sent, not when this object is made, so that whatever
    keeps it from being sent cannot leave anything behind. A refusal is raised before the answer
    begins, and gets a status of its own; an error after that is an event.
    """

    def __init__(
        self, service: GenerationService, request: CompletionRequest, *, timeout_s: float | None
    ) -> None:
        super().__init__()
        self._service = service
        self._request = request
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._service.open(self._request, timeout_s=self._timeout_s) as generation:
            stream = StreamingResponse(
                _events(self._service, generation, self._request.stream_options),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            )
            await stream(scope, receive, send)


async def _events(
    service: GenerationService, generation: Generation, options: StreamOptions | None
) -> AsyncIterator[str]:
    """Server-sent events; an error after the start is an event of its own."""
    options = options or StreamOptions()
    is_usage_continuous = options.include_usage and options.continuous_usage_stats
    try:
        async with aclosing(service.run(generation)) as deltas:
            async for index, delta in deltas:
                if delta.text or delta.finish_reason:
                    usage = _usage(generation) if is_usage_continuous else None
                    choices = [_delta_choice(index, delta)]
                    yield _event(_completion(service, generation, choices, usage=usage))
        if options.include_usage:
            yield _event(_completion(service, generation, [], usage=_usage(generation)))
    except TandemError as error:
        yield _event(error_body(error))
    except Exception:
        logger.exception("a stream failed")
        yield _event(error_body(internal_error()))
    yield "data: [DONE]\n\n"


def _event(body: Completion | ErrorBody) -> str:
    return f"data: {body.model_dump_json()}\n\n"


def _delta_choice(index: int, delta: Delta) -> CompletionChoice:
    return CompletionChoice(index=index, text=delta.text, finish_reason=delta.finish_reason)


def _completion(
    service: GenerationService,
    generation: Generation,
    choices: list[CompletionChoice],
    usage: Usage | None = None,
) -> Completion:
    return Completion(
        id=generation.id,
        created=generation.created,
        model=service.model.name,
        choices=choices,
        usage=usage,
    )


def _usage(generation: Generation) -> Usage:
    counts = generation.counts
    num_completion = generation.num_completion_tokens
    return Usage(
        prompt_tokens=generation.num_prompt_tokens,
        completion_tokens=num_completion,
        total_tokens=generation.num_prompt_tokens + num_completion,
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=counts.num_accepted,
            rejected_prediction_tokens=counts.num_draft_tokens - counts.num_accepted,
        ),
    )
