"""A gRPC call's context as Serve's handlers get it, and what a router reads from it."""

from collections.abc import Iterable
from typing import Any, Protocol

import grpc

CallContext = grpc.aio.ServicerContext[Any, Any]
Metadata = tuple[tuple[str, str | bytes], ...]

_TIMEOUT = "x-tandem-timeout-seconds"
"""Metadata of ours, by which a proxy tells a router how long a client waits."""


class StatusContext(Protocol):
    """The part of Serve's gRPC context that a router uses."""

    def set_code(self, code: grpc.StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, metadata: list[tuple[str, str]]) -> None: ...

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]: ...


def timeout_s(context: StatusContext) -> float | None:
    """The seconds that the client waited for its call when it reached the proxy; None for ever."""
    stated = dict(context.invocation_metadata()).get(_TIMEOUT)
    return None if stated is None else float(stated)


class OutlivingContext:
    """A call's context for a handler that ends after its call, with the time that the client gives.

    Serve asks for the peer at the very end, for its access log: of a call that is gone, that would
    crash the process.
    """

    def __init__(self, context: CallContext) -> None:
        self._context = context
        self._peer = context.peer()
        self._metadata = _with_timeout(context)

    def peer(self) -> str:
        return self._peer

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _with_timeout(context: CallContext) -> Metadata:
    """The metadata that the client sent, without what is ours to say, and the time that it
    waits."""
    sent = [(key, value) for key, value in context.invocation_metadata() or () if key != _TIMEOUT]
    left_s = context.time_remaining()
    # one that never ends may be told as a time of centuries
    return (*sent, *([] if left_s is None else [(_TIMEOUT, f"{left_s:.3f}")]))


class ProbeContext:
    """A context for a call of our own, whose status is not that of the client's call."""

    def __init__(self, context: CallContext) -> None:
        self._context = OutlivingContext(context)
        self._code: grpc.StatusCode | None = None
        self._details = ""

    def code(self) -> grpc.StatusCode | None:
        return self._code

    def details(self) -> str:
        return self._details

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def set_trailing_metadata(self, metadata: Any) -> None:
        """Drop the metadata: it is about the probe."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)
