"""Handlers of ours in Serve's gRPC proxy: they miss no client that leaves, and name bad messages.

A message whose bytes are no request is answered with INVALID_ARGUMENT.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from deployments.api.serve_log import leave_out_told_errors
from deployments.api.tandem_pb2 import GenerateRequest
from deployments.api.tandem_pb2_grpc import GenerationServicer, add_GenerationServicer_to_server

CallContext = grpc.aio.ServicerContext[Any, Any]
StreamHandler = Callable[[Any, Any], AsyncIterator[Any]]

SERVICER_FUNCTION = f"{__name__}.add_generation_to_server"
"""The import path that Serve's `grpc_servicer_functions` names."""

MAX_MESSAGE_BYTES = 64 * 1024**2
"""The longest message that a proxy hands on; the app's own limit is not known to a proxy."""
MALFORMED = "the message is no GenerateRequest: its bytes are not that protobuf message"


def add_generation_to_server(servicer: GenerationServicer, server: Any) -> None:
    """Register the service so that streams are cancelled whenever their client is gone.

    Serve calls this in place of the generated function.

    `server` is Serve's own: it replaces every handler by one of its `service_handler_factory`,
    which sends the request to a replica. Those learn that the client has gone only while they wait
    for the replica. Cancelled while they write, they are dropped, and the replica generates on.
    """
    leave_out_told_errors()
    make_handler = server.service_handler_factory
    server.service_handler_factory = partial(_make_handler, make_handler)
    try:
        add_GenerationServicer_to_server(servicer, _Registrar(server))  # type: ignore[no-untyped-call]
    finally:
        server.service_handler_factory = make_handler


class _Registrar:
    """The server as the generated code sees it: bytes reach our handlers unread.

    What a deserializer of gRPC's raises ends a call as UNKNOWN, with the name of a class.
    """

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Left to the other call, which has the same methods."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        raw = {
            method: handler._replace(request_deserializer=None)
            for method, handler in handlers.items()
        }
        generic = grpc.method_handlers_generic_handler(service, raw)
        self._server.add_generic_rpc_handlers((generic,))
        self._server.add_registered_method_handlers(service, raw)


def _make_handler(
    make_handler: Callable[..., Any], *, service_method: str, streaming_type: Any
) -> Any:
    handler = make_handler(service_method=service_method, streaming_type=streaming_type)
    if streaming_type.name == "UNARY_STREAM":
        return _pump(handler)
    return _reading(handler) if streaming_type.name == "UNARY_UNARY" else handler


def _reading(handler: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Any]:
    async def unary(raw: bytes, context: CallContext) -> Any:
        return await handler(await _read(raw, context), context)

    return unary


async def _read(raw: bytes, context: CallContext) -> GenerateRequest:
    """The message; ends the call if it is none, or so long that no app takes it."""
    if len(raw) > MAX_MESSAGE_BYTES:
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the message has {len(raw)} bytes; at most {MAX_MESSAGE_BYTES} are handed on",
        )
    try:
        return GenerateRequest.FromString(raw)
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, MALFORMED)


def _pump(handler: StreamHandler) -> StreamHandler:
    """Let the handler wait for its replica in a task of its own, that ends with the call."""

    async def stream(raw: bytes, context: CallContext) -> AsyncIterator[Any]:
        source = handler(await _read(raw, context), _OutlivingContext(context))
        messages: asyncio.Queue[Any] = asyncio.Queue()

        async def run() -> None:
            try:
                async for message in source:
                    messages.put_nowait(message)
            finally:
                messages.put_nowait(None)

        first = await anext(source, None)  # reads the context, so not in a task that may outlive it
        task = asyncio.create_task(run())
        task.add_done_callback(_note_failure)
        context.add_done_callback(lambda _: task.cancel())  # type: ignore[arg-type]  # wrong stub
        if first is not None:
            yield first
        while (message := await messages.get()) is not None:
            yield message
        await task

    return stream


def _note_failure(task: asyncio.Task[None]) -> None:
    """Look at what has ended a task whose call may be gone; unseen, it would be logged."""
    if not task.cancelled():
        task.exception()


class _OutlivingContext:
    """A call's context for a handler that ends after its call.

    Serve asks for the peer at the very end, for its access log: of a call that is gone, that would
    crash the process.
    """

    def __init__(self, context: CallContext) -> None:
        self._context = context
        self._peer = context.peer()

    def peer(self) -> str:
        return self._peer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)
