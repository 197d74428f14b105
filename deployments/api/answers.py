"""Answers over HTTP: a generation's results as one JSON object, or as server-sent events.

What the objects look like is an endpoint's own affair: a Writer of it makes them.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from deployments.api.auth import caller_of
from deployments.api.errors import error_body
from deployments.api.openai import StreamOptions, Usage
from deployments.api.validation import RequestModel
from deployments.router.generation import Generation
from deployments.router.request import GenerationRequest
from deployments.router.sequence import Delta, is_long_to_write
from deployments.router.service import GenerationService
from workers.errors import TandemError, internal_error

logger = logging.getLogger(__name__)

PIECE_LEN = 2**20
"""Bytes of a body that are handed on at a time."""


class Writer(Protocol):
    """Writes one generation's results in the format of an endpoint."""

    def choice(self, index: int, completion: Delta) -> BaseModel:
        """One of the `choices` of an answer without a stream; they are asked for in their order."""
        ...

    def answer(self, usage: Usage) -> BaseModel:
        """The answer without a stream, whose `choices`, not yet in it, were all written."""
        ...

    def events(self, index: int, delta: Delta, usage: Usage | None) -> Iterable[BaseModel]:
        """Events of a stream: what is new of the choice `index`, if there is anything to say."""
        ...

    def usage_event(self, usage: Usage) -> BaseModel:
        """The last event of a stream, where the client asked for its usage."""
        ...


MakeWriter = Callable[[Generation, str], Writer]
"""A function that makes a writer from the generation and the model's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A route that answers requests of one format."""

    path: str
    request_model: type[RequestModel]
    """The model that checks a body."""
    add_route: Callable[[FastAPI, GenerationService], None]


class Answer(Response):
    """The completions in one object, or as they are written where there are options of a stream.

    The request is admitted when the answer is sent, not when this object is made, so that whatever
    keeps it from being sent cannot leave anything behind. A refusal is raised before the answer
    begins, and gets a status of its own; an error after that is an event of the stream.
    """

    def __init__(
        self,
        service: GenerationService,
        request: GenerationRequest,
        make_writer: MakeWriter,
        *,
        stream_options: StreamOptions | None,
    ) -> None:
        super().__init__()
        self._service = service
        self._request = request
        self._make_writer = make_writer
        self._stream_options = stream_options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._service.open(self._request, caller_of(scope)) as generation:
            writer = self._make_writer(generation, self._service.model.name)
            if (options := self._stream_options) is not None:
                stream = StreamingResponse(
                    self._events(generation, writer, options),
                    media_type="text/event-stream",
                    headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
                )
                await stream(scope, receive, send)
                return
            content = await self._whole(generation, writer)
        await _InPieces(content, media_type="application/json")(scope, receive, send)

    async def _whole(self, generation: Generation, writer: Writer) -> bytes:
        """The answer as JSON. A long one is written a choice at a time: a client that leaves ends
        it between two."""
        off_loop = generation.off_loop
        completions = await generation.complete()
        is_long = is_long_to_write(completions)
        choices = [
            await off_loop(_choice, is_long, writer, *each) for each in enumerate(completions)
        ]
        answer = writer.answer(Usage.of(generation.usage)).model_dump_json().encode()
        return await off_loop(_with_choices, is_long, answer, choices)

    async def _events(
        self, generation: Generation, writer: Writer, options: StreamOptions
    ) -> AsyncIterator[str]:
        shows_tokens = self._request.shows_tokens
        with_usage = options.include_usage
        is_usage_continuous = with_usage and options.continuous_usage_stats
        try:
            async with aclosing(generation.run()) as deltas:
                async for index, delta in deltas:
                    if delta.text or delta.finish_reason or delta.prompt or shows_tokens:
                        usage = Usage.of(generation.usage) if is_usage_continuous else None
                        is_long = is_long_to_write([delta])
                        for event in await generation.off_loop(
                            _written, is_long, writer, index, delta, usage
                        ):
                            yield event
            if with_usage:
                yield _event(writer.usage_event(Usage.of(generation.usage)))
        except TandemError as error:
            yield _event(error_body(error))
        except Exception:
            logger.exception("a stream failed")
            yield _event(error_body(internal_error()))
        yield "data: [DONE]\n\n"


class _InPieces(Response):
    """A response that lets other requests have their turn while a long body is handed on."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        for end in range(PIECE_LEN, len(self.body) + PIECE_LEN, PIECE_LEN):
            piece, has_more = self.body[end - PIECE_LEN : end], end < len(self.body)
            await send({"type": "http.response.body", "body": piece, "more_body": has_more})
            await asyncio.sleep(0)


_NO_CHOICES = b'"choices":[]'
"""The JSON of an answer that has no choices yet; no string in it can have such quotes."""


def _choice(writer: Writer, index: int, completion: Delta) -> bytes:
    return writer.choice(index, completion).model_dump_json().encode()


def _with_choices(answer: bytes, choices: Sequence[bytes]) -> bytes:
    before, after = answer.split(_NO_CHOICES)
    return b'%b"choices":[%b]%b' % (before, b",".join(choices), after)


def _written(writer: Writer, index: int, delta: Delta, usage: Usage | None) -> list[str]:
    return [_event(event) for event in writer.events(index, delta, usage)]


def _event(body: BaseModel) -> str:
    return f"data: {body.model_dump_json()}\n\n"
