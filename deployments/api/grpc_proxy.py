"""Handlers of ours in Serve's gRPC proxy: they miss no client that leaves, and name bad messages.

A message whose bytes are no request is answered with INVALID_ARGUMENT. What time a client gives its
call is told to the router, which ends the request by itself when it is over.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from ray.serve._private.proxy_request_response import gRPCStreamingType

from deployments.api.grpc_context import CallContext, OutlivingContext
from deployments.api.grpc_health import HealthServicer
from deployments.api.serve_log import leave_out_told_errors
from deployments.api.tandem_pb2_grpc import GenerationServicer, add_GenerationServicer_to_server

Unary = Callable[[Any, Any], Awaitable[Any]]
Stream = Callable[[Any, Any], AsyncIterator[Any]]
Read = Callable[[bytes, CallContext], Awaitable[Any]]
MakeHandler = Callable[..., Any]
"""Serve's `service_handler_factory`: makes what sends a request to a replica."""

SERVICER_FUNCTION = f"{__name__}.add_generation_to_server"
"""The import path that Serve's `grpc_servicer_functions` names."""

MAX_MESSAGE_BYTES = 64 * 1024**2
"""The longest message that a proxy hands on; the app's own limit is not known to a proxy."""


def add_generation_to_server(servicer: GenerationServicer, server: Any) -> None:
    """Register our services so that every call ends whenever its client is gone.

    Serve calls this in place of the generated function.

    `server` is Serve's own. It would replace every handler by one of its `service_handler_factory`,
    which sends the request to a replica. Those learn that the client has gone only while they wait
    for the replica: cancelled while they write, they are dropped, and the replica generates on. So
    handlers of ours stand in front of them.
    """
    leave_out_told_errors()
    make_handler = server.service_handler_factory
    add_GenerationServicer_to_server(  # type: ignore[no-untyped-call]
        servicer, _Registrar(server, partial(_routed, make_handler))
    )
    local: Any = _Registrar(server, _local)
    add_HealthServicer_to_server(HealthServicer(make_handler), local)


class _Registrar:
    """The server as the generated code sees it: bytes reach our handlers unread.

    What a deserializer of gRPC's raises ends a call as UNKNOWN, with the name of a class.
    """

    def __init__(self, server: Any, make: Callable[[str, Any, Read], Any]) -> None:
        """`make` is given a method's path, its generated handler and what reads its requests."""
        self._server = server
        self._make = make

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Do nothing: the other call brings the same methods."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        ours = {
            method: self._make(f"/{service}/{method}", handler, _reader(handler))
            for method, handler in handlers.items()
        }
        self._server.add_passthrough_service(service)  # our handlers call Serve's themselves
        generic = grpc.method_handlers_generic_handler(service, ours)
        self._server.add_generic_rpc_handlers((generic,))
        self._server.add_registered_method_handlers(service, ours)


def _routed(make_handler: MakeHandler, path: str, handler: Any, read: Read) -> Any:
    """A method that a replica answers, in bytes."""
    if handler.unary_stream is not None:
        stream = make_handler(service_method=path, streaming_type=gRPCStreamingType.UNARY_STREAM)
        return grpc.unary_stream_rpc_method_handler(_pump(stream, read))
    unary = make_handler(service_method=path, streaming_type=gRPCStreamingType.UNARY_UNARY)
    return grpc.unary_unary_rpc_method_handler(_outliving(unary, read))


def _local(path: str, handler: Any, read: Read) -> Any:  # noqa: ARG001
    """A method that is answered here, in the proxy."""
    if handler.unary_stream is None:

        async def unary(raw: bytes, context: CallContext) -> Any:
            return await handler.unary_unary(await read(raw, context), context)

        return handler._replace(unary_unary=unary, request_deserializer=None)

    async def stream(raw: bytes, context: CallContext) -> AsyncIterator[Any]:
        async for message in handler.unary_stream(await read(raw, context), context):
            yield message

    return handler._replace(unary_stream=stream, request_deserializer=None)


def malformed(name: str) -> str:
    """What a client is told whose bytes are no message of that name."""
    return f"the message is no {name}: its bytes are not that protobuf message"


def _reader(handler: Any) -> Read:
    """Reads a method's requests; ends the call if one is none, or so long that no app takes it."""
    parse = handler.request_deserializer  # FromString, of the message's class

    async def read(raw: bytes, context: CallContext) -> Any:
        if len(raw) > MAX_MESSAGE_BYTES:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the message has {len(raw)} bytes; at most {MAX_MESSAGE_BYTES} are handed on",
            )
        try:
            return parse(raw)
        except DecodeError:
            name = parse.__self__.DESCRIPTOR.name
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, malformed(name))

    return read


def _outliving(handler: Unary, read: Read) -> Unary:
    """Hand a request on with a context that may be asked when the call is gone."""

    async def unary(raw: bytes, context: CallContext) -> Any:
        return await handler(await read(raw, context), OutlivingContext(context))

    return unary


def _pump(handler: Stream, read: Read) -> Callable[[bytes, CallContext], AsyncIterator[Any]]:
    """Let the handler wait for its replica in a task of its own, that ends with the call."""

    async def stream(raw: bytes, context: CallContext) -> AsyncIterator[Any]:
        source = handler(await read(raw, context), OutlivingContext(context))
        # No bound. What is not fetched from the replica waits in this process too, as objects of
        # Ray's; and the handler has to wait for the replica, not for a reader, when the call ends.
        messages: asyncio.Queue[Any] = asyncio.Queue()

        async def run() -> None:
            try:
                async for message in source:
                    if message:  # an empty one has only brought the call's metadata
                        messages.put_nowait(message)
            finally:
                messages.put_nowait(None)

        first = await anext(source, None)  # reads the context, so not in a task that may outlive it
        task = asyncio.create_task(run())
        task.add_done_callback(_note_failure)
        context.add_done_callback(lambda _: task.cancel())  # type: ignore[arg-type]  # wrong stub
        if first:
            yield first
        while (message := await messages.get()) is not None:
            yield message
        await task

    return stream


def _note_failure(task: asyncio.Task[None]) -> None:
    """Look at what has ended a task whose call may be gone; unseen, it would be logged."""
    if not task.cancelled():
        task.exception()
