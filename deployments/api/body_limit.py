"""ASGI middleware that reads bodies, within bounds of length, time and memory."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api.errors import error_response
from workers.errors import (
    OverloadedError,
    RequestTimeoutError,
    RequestTooLargeError,
    TandemError,
)

WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods whose bodies nobody reads."""
MAX_DRAINED = 16
"""How many times the greatest length is read and dropped of a body that is too long."""
DRAIN_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 60.0
"""Seconds from the first byte of a body to its last; a client that takes longer holds a place of
others."""
MAX_UNFINISHED = 64
"""Bodies of the greatest length whose parts may wait for their rest, all requests together."""
MAX_DIGITS = 18
"""The most digits of a stated length that are looked at: more than any limit has."""


class BodyLimit:
    """ASGI middleware: reads a request's body whole, or answers as soon as it goes out of bounds.

    413 if it is too long, 408 if it does not arrive in time, 429 if unfinished bodies of all
    requests take too much memory. The length that a client states is believed only where it is too
    long: one that sends in chunks states none. Starlette's own middleware answers in plain text.
    """

    def __init__(
        self, app: ASGIApp, *, max_bytes: int, read_timeout_s: float = READ_TIMEOUT_S
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._read_timeout_s = read_timeout_s
        self._num_unfinished_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in WITHOUT_BODY:
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read_in_time(_stated_length(scope), receive)
        except TandemError as error:
            response = error_response(error)
            response.headers["Connection"] = "close"  # what may still come is not read
            await response(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replayed(body, receive), send)

    async def _read_in_time(self, stated_length: int, receive: Receive) -> bytes | None:
        try:
            async with asyncio.timeout(self._read_timeout_s):
                return await self._read(stated_length, receive)
        except TimeoutError:
            raise RequestTimeoutError(
                f"the request's body did not arrive within {self._read_timeout_s:g} s"
            ) from None

    async def _read(self, stated_length: int, receive: Receive) -> bytes | None:
        """The body; None if its client left before it was sent."""
        body = bytearray()
        has_more = True
        try:
            while has_more:
                if max(stated_length, len(body)) > self._max_bytes:
                    await self._drain(receive)
                    raise self._too_large(max(stated_length, len(body)))
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                part = message.get("body", b"")
                body += part
                self._num_unfinished_bytes += len(part)
                has_more = message.get("more_body", False)
                if has_more and self._num_unfinished_bytes > MAX_UNFINISHED * self._max_bytes:
                    raise OverloadedError(
                        "too many long requests are being sent at a time; try again",
                        retry_after_s=1,
                    )
        finally:
            self._num_unfinished_bytes -= len(body)
        if len(body) > self._max_bytes:
            raise self._too_large(len(body))
        return bytes(body)

    async def _drain(self, receive: Receive) -> None:
        """Let the client send on for a while: most see an answer only when they have sent all.

        Where the connection ends under their hands, they are told of that, and not why.
        """
        num_left = MAX_DRAINED * self._max_bytes
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                while num_left > 0:
                    message = await receive()
                    num_left -= len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return
        except TimeoutError:
            return

    def _too_large(self, num_bytes: int) -> RequestTooLargeError:
        return RequestTooLargeError(
            f"the request's body has {num_bytes} bytes or more; at most {self._max_bytes} are read "
            "(the option max_request_bytes); send a shorter prompt"
        )


def _stated_length(scope: Scope) -> int:
    stated = dict(scope["headers"]).get(b"content-length", b"")
    return int(stated[:MAX_DIGITS]) if stated.isdigit() else 0


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that has the body in one message, and what comes after it."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
