"""No more of a request's body is read than the server takes."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api.errors import error_response
from workers.errors import RequestTooLargeError

WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods whose bodies nobody reads."""


class BodyLimit:
    """ASGI middleware: reads a request's body whole, or answers 413 as soon as it is too long.

    The length that a client states is believed only where it is too long: one that sends in chunks
    states none. Starlette's own middleware for this answers in plain text.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in WITHOUT_BODY:
            await self._app(scope, receive, send)
            return
        try:
            self._check(_stated_length(scope))
            body = await self._read(receive)
        except RequestTooLargeError as error:
            response = error_response(error)
            response.headers["Connection"] = "close"  # what is still to come is not read
            await response(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replayed(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body; None if its client left before it was sent."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            self._check(len(body))
            if not message.get("more_body", False):
                return bytes(body)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise RequestTooLargeError(
                f"the request's body has {num_bytes} bytes or more; at most {self._max_bytes} are "
                "read (the option max_request_bytes); send a shorter prompt"
            )


def _stated_length(scope: Scope) -> int:
    stated = dict(scope["headers"]).get(b"content-length", b"")
    return int(stated) if stated.isdigit() else 0


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that has the body in one message, and what comes after it."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
