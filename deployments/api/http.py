"""The HTTP routes, OpenAI's wire format. The app is built around a service, so that tests need no
Serve and no socket."""

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from deployments.api.errors import error_body, http_error, http_headers
from deployments.api.openai import (
    Completion,
    CompletionChoice,
    CompletionRequest,
    CompletionTokensDetails,
    ErrorBody,
    ErrorDetail,
    ModelCard,
    ModelList,
    Usage,
)
from deployments.api.validation import invalid_request
from deployments.router.sequence import Delta
from deployments.router.service import Generation, GenerationService
from workers.errors import TandemError

logger = logging.getLogger(__name__)


def make_app(service: GenerationService) -> FastAPI:
    """The ASGI app that serves one GenerationService."""
    app = FastAPI(title="Tandem", description="Speculative decoding, OpenAI's wire format.")
    _add_error_handlers(app)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok", "model": service.model.name}

    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[_model_card(service)])

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> ModelCard | JSONResponse:
        if name != service.model.name:
            detail = ErrorDetail(
                message=f"there is no model {name!r}; {service.model.name!r} is served",
                type="invalid_request_error",
                param="model",
                code="model_not_found",
            )
            return _json(404, ErrorBody(error=detail))
        return _model_card(service)

    @app.post(
        "/v1/completions",
        response_model=None,
        responses={
            200: {"model": Completion},
            **{status: {"model": ErrorBody} for status in (400, 404, 429, 503)},
        },
    )
    async def completions(request: CompletionRequest) -> Response:
        generation = await service.open(request)
        if not request.stream:
            return await _whole(service, generation)
        options = request.stream_options
        return StreamingResponse(
            _events(service, generation, include_usage=bool(options and options.include_usage)),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    return app


def _add_error_handlers(app: FastAPI) -> None:
    """Every failure has OpenAI's error body; no traceback reaches a client."""

    @app.exception_handler(TandemError)
    async def on_tandem_error(_: Request, error: TandemError) -> JSONResponse:
        return _error_response(error)

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(_: Request, error: RequestValidationError) -> JSONResponse:
        return _error_response(invalid_request(error.errors()))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        detail = ErrorDetail(message=message, type="invalid_request_error")
        return _json(error.status_code, ErrorBody(error=detail), error.headers)

    @app.exception_handler(Exception)
    async def on_defect(_: Request, error: Exception) -> JSONResponse:
        logger.exception("a request failed", exc_info=error)
        return _error_response(_internal_error())


def _internal_error() -> TandemError:
    return TandemError("internal error; the server's log says more")


def _error_response(error: TandemError) -> JSONResponse:
    return _json(http_error(error).status, error_body(error), http_headers(error))


def _json(status: int, body: ErrorBody, headers: object = None) -> JSONResponse:
    return JSONResponse(
        body.model_dump(),
        status_code=status,
        headers=dict(headers) if headers else None,  # type: ignore[call-overload]
    )


def _model_card(service: GenerationService) -> ModelCard:
    return ModelCard(
        id=service.model.name,
        created=service.model.created,
        max_model_len=service.model.info.max_model_len,
    )


async def _whole(service: GenerationService, generation: Generation) -> Response:
    """The completions once they are finished."""
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


async def _events(
    service: GenerationService, generation: Generation, *, include_usage: bool
) -> AsyncIterator[str]:
    """Server-sent events; an error after the start is an event of its own."""
    try:
        async with aclosing(service.run(generation)) as deltas:
            async for index, delta in deltas:
                if delta.text or delta.finish_reason:
                    yield _event(_completion(service, generation, [_delta_choice(index, delta)]))
        if include_usage:
            yield _event(_completion(service, generation, [], usage=_usage(generation)))
    except TandemError as error:
        yield _event(error_body(error))
    except Exception:
        logger.exception("a stream failed")
        yield _event(error_body(_internal_error()))
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
