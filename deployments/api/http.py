"""The HTTP routes, OpenAI's wire format. The app is built around a service, so that tests need no
Serve and no socket."""

import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from cluster.version import installed_version
from deployments.api import chat, completions, tokens
from deployments.api.auth import RequireKey
from deployments.api.body_limit import BodyLimit
from deployments.api.errors import ErrorBody, ErrorDetail, error_response, told
from deployments.api.openai import ModelCard, ModelList
from deployments.api.validation import brief, invalid_request, unreadable_body
from deployments.router.service import GenerationService
from workers.errors import TandemError, internal_error

logger = logging.getLogger(__name__)

ENDPOINTS = (completions.ENDPOINT, chat.ENDPOINT, tokens.TOKENIZE, tokens.DETOKENIZE)
REQUEST_MODELS = {endpoint.path: endpoint.request_model for endpoint in ENDPOINTS}

HINTS = {
    "/metrics": "; Ray exports the metrics at a port of its own, which `tandem serve` names when "
    "it is ready (docs/metrics.md)",
    "/v1/responses": "; it is not served, use /v1/chat/completions",
    "/v1/messages": "; it is not served, use /v1/chat/completions",
    "/v1/embeddings": "; models that embed are not served",
    **{
        path.removeprefix("/v1"): f"; did you mean {path}?"
        for path in (*REQUEST_MODELS, "/v1/models")
        if path.startswith("/v1")
    },
}
"""What to say of paths that are not here, though other servers have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    max_request_bytes: int
    cors_allow_origins: tuple[str, ...] = ()
    """Where pages may come from whose scripts call this server; `*` for anywhere."""


def make_app(service: GenerationService, options: HttpOptions) -> FastAPI:
    """The ASGI app that serves one GenerationService."""
    app = FastAPI(title="Tandem", description="Speculative decoding, OpenAI's wire format.")
    app.add_middleware(BodyLimit, max_bytes=options.max_request_bytes)
    app.add_middleware(RequireKey, service=service)
    if options.cors_allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_allow_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    _add_error_handlers(app)
    _add_status_routes(app, service)
    _add_model_routes(app, service)

    for endpoint in ENDPOINTS:
        endpoint.add_route(app, service)
    return app


def _add_status_routes(app: FastAPI, service: GenerationService) -> None:
    async def health() -> JSONResponse:
        """200 while this router works; 503 if no target has answered for long, or rounds stall."""
        return _status(service, "ok", service.why_unhealthy())

    async def ready() -> JSONResponse:
        """200 if a target would answer now, else 503."""
        return _status(service, "ready", service.why_not_ready())

    async def version() -> JSONResponse:
        """The version of the server."""
        return JSONResponse({"version": installed_version()})

    _add_get(app, "/version", version)
    _add_get(app, "/health", health)
    _add_get(app, "/ready", ready)


def _status(service: GenerationService, word: str, problem: str | None) -> JSONResponse:
    if problem is None:
        return JSONResponse({"status": word, "model": service.model.name})
    content = {"status": f"not {word}", "model": service.model.name, "reason": problem}
    return JSONResponse(content, status_code=503)


def _add_model_routes(app: FastAPI, service: GenerationService) -> None:
    info, draft = service.model.info, service.model.draft
    cards = {
        name: ModelCard(
            id=name,
            created=service.model.created,
            max_model_len=info.max_model_len,
            weight_bytes=info.weight_bytes,
            quantization=info.quantization,
            draft_weight_bytes=None if draft is None else draft.weight_bytes,
            draft_quantization=None if draft is None else draft.quantization,
        )
        for name in service.model.names
    }

    async def models() -> ModelList:
        return ModelList(data=list(cards.values()))

    async def model(name: str) -> ModelCard | JSONResponse:
        if name in cards:
            return cards[name]
        detail = ErrorDetail(
            message=f"there is no model {brief(name)}; {service.model.name!r} is served",
            type="invalid_request_error",
            param="model",
            code="model_not_found",
        )
        return JSONResponse(ErrorBody(error=detail).model_dump(), status_code=404)

    _add_get(app, "/v1/models", models, response_model=ModelList)
    _add_get(
        app,
        "/v1/models/{name:path}",
        model,
        response_model=None,
        responses={200: {"model": ModelCard}, 404: {"model": ErrorBody}},
    )


def _add_get(
    app: FastAPI, path: str, handler: Callable[..., Coroutine[Any, Any, Any]], **options: Any
) -> None:
    """A route that answers HEAD as well, as probes and load balancers like to ask."""
    options.setdefault("response_model", None)
    app.add_api_route(path, handler, methods=["GET"], **options)
    app.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False, **options)


def _add_error_handlers(app: FastAPI) -> None:
    """Every failure has OpenAI's error body; no traceback reaches a client."""

    @app.exception_handler(TandemError)
    async def on_tandem_error(_: Request, error: TandemError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        model = REQUEST_MODELS.get(request.scope["route"].path)
        return error_response(invalid_request(error.errors(), model))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 400:  # only of reading the body
            return error_response(unreadable_body(error.__cause__))
        hint = HINTS.get(request.url.path, "") if error.status_code == 404 else ""
        message = told(f"{request.method} {request.url.path}: {error.detail}{hint}")
        detail = ErrorDetail(message=message, type="invalid_request_error")
        return JSONResponse(
            ErrorBody(error=detail).model_dump(),
            status_code=error.status_code,
            headers=dict(error.headers) if error.headers else None,
        )

    @app.exception_handler(Exception)
    async def on_defect(_: Request, error: Exception) -> JSONResponse:
        logger.exception("a request failed", exc_info=error)
        return error_response(internal_error())
