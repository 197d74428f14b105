"""Answers of any endpoint: what it needs is a request, a writer and a route."""

import json
from collections.abc import Sequence

import httpx
from fastapi import FastAPI, Response
from pydantic import BaseModel

from deployments.api.answers import Answer
from deployments.api.openai import OpenAIRequest, Usage
from deployments.router.generation import Generation
from deployments.router.sequence import Delta, Origin
from deployments.router.service import GenerationService
from tests.deployments.serving import LocalServing


class Question(OpenAIRequest):
    words: list[str]


class Reply(BaseModel):
    id: str
    drafted: list[list[bool]] = []
    """For each token of each answer, whether it was drafted."""
    num_tokens: int | None = None


class ReplyWriter:
    """Writes where tokens came from, which OpenAI's completions do not tell."""

    def __init__(self, generation: Generation, model: str) -> None:
        self._id = f"{model}-{generation.id}"

    def whole(self, completions: Sequence[Delta], usage: Usage) -> Reply:
        drafted = [_drafted(completion) for completion in completions]
        return Reply(id=self._id, drafted=drafted, num_tokens=usage.completion_tokens)

    def events(self, index: int, delta: Delta, usage: Usage | None) -> list[Reply]:  # noqa: ARG002
        return [Reply(id=self._id, drafted=[_drafted(delta)])]

    def usage_event(self, usage: Usage) -> Reply:
        return Reply(id=self._id, num_tokens=usage.completion_tokens)


def _drafted(delta: Delta) -> list[bool]:
    return [record.origin is Origin.ACCEPTED for record in delta.records]


def answering(service: GenerationService) -> FastAPI:
    app = FastAPI()

    @app.post("/answers", response_model=None)
    async def answer(body: Question) -> Response:
        request = body.to_request(model=body.model, prompts=[" ".join(body.words)], n=body.n)
        return Answer(service, request, ReplyWriter, stream_options=body.used_stream_options)

    return app


async def test_a_new_format_is_a_request_and_a_writer(serving: LocalServing) -> None:
    transport = httpx.ASGITransport(answering(serving.service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        question = {"model": "tiny", "words": ["Hello", "you"], "max_tokens": 12, "seed": 3,
                    "ignore_eos": True}  # fmt: skip
        whole = (await client.post("/answers", json={**question, "n": 2})).json()
        assert whole["id"].startswith("tiny-")
        assert whole["num_tokens"] == 24
        assert [len(drafted) for drafted in whole["drafted"]] == [12, 12]
        assert any(whole["drafted"][0])
        options = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = await client.post("/answers", json={**question, **options})
        *lines, end = streamed.text.split("\n\n")[:-1]
        assert end == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        drafted = [was for event in events for choice in event["drafted"] for was in choice]
        assert len(drafted) == events[-1]["num_tokens"] == 12
        assert any(drafted)
    await serving.wait_until_nothing_is_held()
