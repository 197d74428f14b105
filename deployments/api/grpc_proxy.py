"""What Serve's gRPC proxy runs of ours: registering the service, so that no client's leaving is
missed."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc

from deployments.api.tandem_pb2_grpc import GenerationServicer, add_GenerationServicer_to_server

CallContext = grpc.aio.ServicerContext[Any, Any]
StreamHandler = Callable[[Any, Any], AsyncIterator[Any]]

SERVICER_FUNCTION = f"{__name__}.add_generation_to_server"
"""The import path that Serve's `grpc_servicer_functions` names."""


def add_generation_to_server(servicer: GenerationServicer, server: Any) -> None:
    """As the generated function, with streams that are cancelled whenever their client is gone.

    `server` is Serve's own: it replaces every handler by one of its `service_handler_factory`,
    which sends the request to a replica. Those learn that the client has gone only while they wait
    for the replica. Cancelled while they write, they are dropped, and the replica generates on.
    """
    make_handler = server.service_handler_factory
    server.service_handler_factory = partial(_make_handler, make_handler)
    try:
        add_GenerationServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    finally:
        server.service_handler_factory = make_handler


def _make_handler(
    make_handler: Callable[..., Any], *, service_method: str, streaming_type: Any
) -> Any:
    handler = make_handler(service_method=service_method, streaming_type=streaming_type)
    return _pump(handler) if streaming_type.name == "UNARY_STREAM" else handler


def _pump(handler: StreamHandler) -> StreamHandler:
    """Let the handler wait for its replica in a task of its own, that ends with the call."""

    async def stream(request: Any, context: CallContext) -> AsyncIterator[Any]:
        source = handler(request, _OutlivingContext(context))
        messages: asyncio.Queue[Any] = asyncio.Queue()

        async def run() -> None:
            try:
                async for message in source:
                    messages.put_nowait(message)
            finally:
                messages.put_nowait(None)

        first = await anext(source, None)  # reads the context, so not in a task that may outlive it
        task = asyncio.create_task(run())
        context.add_done_callback(lambda _: task.cancel())  # type: ignore[arg-type]  # wrong stub
        if first is not None:
            yield first
        while (message := await messages.get()) is not None:
            yield message
        await task

    return stream


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
