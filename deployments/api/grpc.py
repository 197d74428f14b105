"""The gRPC methods of `tandem.v1.Generation`: the same service, in protobuf.

A request is read as HTTP's request of the same kind, so that both have the same fields and rules.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from types import TracebackType
from typing import Any

from grpc_health.v1.health_pb2 import HealthCheckResponse

from deployments.api import tandem_pb2
from deployments.api.auth import authenticate
from deployments.api.chat import ChatCompletionRequest
from deployments.api.completions import CompletionRequest
from deployments.api.errors import grpc_code, retry_metadata, told
from deployments.api.grpc_answers import chunk_of, completion_of, usage_of
from deployments.api.grpc_chat import Messages, chat_fields, tokenize_fields
from deployments.api.grpc_context import StatusContext, timeout_s
from deployments.api.grpc_fields import given_fields
from deployments.api.tokens import TokenizeRequest
from deployments.api.validation import parse
from deployments.router.generation import Generation
from deployments.router.request import Caller, GenerationRequest
from deployments.router.sequence import is_long_to_write
from deployments.router.service import GenerationService
from workers.errors import (
    InvalidRequestError,
    RequestTooLargeError,
    TandemError,
    internal_error,
)

logger = logging.getLogger(__name__)


class Rpcs:
    """The methods, on one GenerationService. A failure sets the status of the call's context."""

    def __init__(self, service: GenerationService, *, max_request_bytes: int) -> None:
        self._service = service
        self._max_request_bytes = max_request_bytes

    async def generate(
        self, request: tandem_pb2.GenerateRequest, context: StatusContext
    ) -> tandem_pb2.GenerateResponse:
        """The completions as a whole."""
        with _FailureSetsStatus(context):
            caller = self._caller(context)
            parsed = self._parse(request, context)
            async with self._service.open(parsed, caller) as generation:
                deltas = await generation.complete()
                is_long = is_long_to_write(deltas)
                completions = [
                    await generation.off_loop(completion_of, is_long, delta) for delta in deltas
                ]
                first = completions[0]
                return tandem_pb2.GenerateResponse(
                    id=f"cmpl-{generation.id}",
                    model=self._service.model.name,
                    usage=usage_of(generation),
                    completions=completions,
                    text=first.text,
                    token_ids=first.token_ids,
                    finish_reason=first.finish_reason,
                )
        return tandem_pb2.GenerateResponse()

    async def generate_stream(
        self, request: tandem_pb2.GenerateRequest, context: StatusContext
    ) -> AsyncIterator[tandem_pb2.GenerateChunk]:
        """The completions, commit by commit."""
        with _FailureSetsStatus(context, is_raised=True):
            caller = self._caller(context)
            parsed = self._parse(request, context, is_stream=True)
            async with (
                self._service.open(parsed, caller) as generation,
                aclosing(generation.run()) as deltas,
            ):
                num_running = len(generation.choices)
                async for index, delta in deltas:
                    num_running -= delta.finish_reason is not None
                    is_long, is_last = is_long_to_write([delta]), num_running == 0
                    yield await generation.off_loop(
                        chunk_of, is_long, generation, index, delta, is_last=is_last
                    )

    async def chat(
        self, request: tandem_pb2.ChatRequest, context: StatusContext
    ) -> tandem_pb2.ChatResponse:
        """The answers to a conversation as a whole."""
        with _FailureSetsStatus(context):
            caller = self._caller(context)
            body = self._parse_chat(request)
            parsed = body.generation_request(timeout_s=timeout_s(context))
            async with self._service.open(parsed, caller) as generation:
                messages = self._messages(body, generation)
                completions = await generation.complete()
                is_long = is_long_to_write(completions)
                choices = [
                    await generation.off_loop(messages.choice, is_long, index, completion)
                    for index, completion in enumerate(completions)
                ]
                return tandem_pb2.ChatResponse(
                    id=f"chatcmpl-{generation.id}",
                    model=self._service.model.name,
                    usage=messages.usage(),
                    choices=choices,
                )
        return tandem_pb2.ChatResponse()

    async def chat_stream(
        self, request: tandem_pb2.ChatRequest, context: StatusContext
    ) -> AsyncIterator[tandem_pb2.ChatChunk]:
        """The answers to a conversation, commit by commit."""
        with _FailureSetsStatus(context, is_raised=True):
            caller = self._caller(context)
            body = self._parse_chat(request, is_stream=True)
            parsed = body.generation_request(timeout_s=timeout_s(context))
            async with (
                self._service.open(parsed, caller) as generation,
                aclosing(generation.run()) as deltas,
            ):
                messages = self._messages(body, generation)
                num_running = len(generation.choices)
                async for index, delta in deltas:
                    num_running -= delta.finish_reason is not None
                    is_long, is_last = is_long_to_write([delta]), num_running == 0
                    yield await generation.off_loop(
                        messages.chunk, is_long, index, delta, is_last=is_last
                    )

    def _parse_chat(
        self, request: tandem_pb2.ChatRequest, *, is_stream: bool = False
    ) -> ChatCompletionRequest:
        self._check(request)
        model = request.model or self._service.model.name
        return parse(
            ChatCompletionRequest, {**chat_fields(request), "model": model, "stream": is_stream}
        )

    def _messages(self, body: ChatCompletionRequest, generation: Generation) -> Messages:
        """What reads the messages in a generation's texts."""
        prompt = generation.choices[0].prompt
        message_format = self._service.message_format(body.conversation(), prompt)
        return Messages(generation, message_format)

    async def tokenize(
        self, request: tandem_pb2.TokenizeRequest, context: StatusContext
    ) -> tandem_pb2.TokenizeResponse:
        """The tokens of a text or a conversation, which may be longer than the context."""
        with _FailureSetsStatus(context):
            caller = self._caller(context)
            self._check(request)
            body = parse(TokenizeRequest, tokenize_fields(request))
            tokens = await body.tokens(self._service, caller)
            names = self._service.token_names(tokens) if request.return_token_strs else ()
            return tandem_pb2.TokenizeResponse(
                tokens=tokens,
                count=len(tokens),
                max_model_len=self._service.model.info.max_model_len,
                token_strs=names,
            )
        return tandem_pb2.TokenizeResponse()

    async def detokenize(
        self, request: tandem_pb2.DetokenizeRequest, context: StatusContext
    ) -> tandem_pb2.DetokenizeResponse:
        """The text of tokens, special ones included."""
        with _FailureSetsStatus(context):
            tenant = self._caller(context).tenant
            self._check(request)
            return tandem_pb2.DetokenizeResponse(
                prompt=await self._service.detokenize(list(request.tokens), tenant)
            )
        return tandem_pb2.DetokenizeResponse()

    async def list_models(
        self,
        request: tandem_pb2.ListModelsRequest,
        context: StatusContext,
    ) -> tandem_pb2.ListModelsResponse:
        """The names under which requests reach the model."""
        with _FailureSetsStatus(context):
            self._caller(context)
            self._check(request)
            model = self._service.model
            cards = [
                tandem_pb2.Model(
                    id=name, created=model.created, max_model_len=model.info.max_model_len
                )
                for name in model.names
            ]
            return tandem_pb2.ListModelsResponse(models=cards)
        return tandem_pb2.ListModelsResponse()

    def health(self) -> HealthCheckResponse:
        """SERVING while a target would answer."""
        is_ready = self._service.why_not_ready() is None
        status = HealthCheckResponse.SERVING if is_ready else HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse(status=status)

    def _caller(self, context: StatusContext) -> Caller:
        """The caller; raises AuthenticationError without a valid key where one is asked for."""
        return authenticate(self._service.keys.ring, context.invocation_metadata())

    def _check(self, request: Any) -> None:
        """Raise for a request that is too long or names a model that is not served here."""
        if (num_bytes := request.ByteSize()) > self._max_request_bytes:
            raise RequestTooLargeError(
                f"the request has {num_bytes} bytes; at most {self._max_request_bytes} are taken "
                "(the option max_request_bytes); send a shorter prompt"
            )
        if name := getattr(request, "model", ""):
            self._service.check_model(name)

    def _parse(
        self,
        request: tandem_pb2.GenerateRequest,
        context: StatusContext,
        *,
        is_stream: bool = False,
    ) -> GenerationRequest:
        self._check(request)
        prompt = request.WhichOneof("prompt")
        if prompt is None:
            raise InvalidRequestError("prompt is missing: set text or token_ids", field="prompt")
        fields = {
            **given_fields(request, CompletionRequest),
            "model": request.model or self._service.model.name,
            "prompt": request.text if prompt == "text" else list(request.token_ids.ids),
            "stream": is_stream,
        }
        return parse(CompletionRequest, fields).generation_request(timeout_s=timeout_s(context))


class _FailureSetsStatus:
    """Gives a failure of its block a code and a message; without a code, Serve sends its traceback.
    An overloaded server says when to come back.

    The error of a stream `is_raised`, without which Serve would end it as if all were well. A
    method with one answer ends without: Serve would log a traceback.
    """

    def __init__(self, context: StatusContext, *, is_raised: bool = False) -> None:
        self._context = context
        self._is_raised = is_raised

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if not isinstance(error, TandemError):
            logger.exception("a request failed", exc_info=error)
            error = internal_error()
        self._context.set_code(grpc_code(error))
        self._context.set_details(told(str(error)))
        if metadata := retry_metadata(error):
            self._context.set_trailing_metadata(list(metadata.items()))
        if self._is_raised:
            raise error from None
        return True
