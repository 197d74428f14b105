"""Answers of any endpoint: what it needs is a request, a writer and a route."""

import asyncio
import json
import threading
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Response
from pydantic import BaseModel
from starlette.types import Message, Receive, Scope, Send

from deployments.api import answers as answers_module
from deployments.api.answers import Answer, MakeWriter
from deployments.api.openai import OpenAIRequest, Usage
from deployments.router import request as request_module
from deployments.router import sequence as sequence_module
from deployments.router.generation import Generation
from deployments.router.sequence import Delta, Origin, TokenRecord, is_long_to_write
from deployments.router.service import GenerationService
from tests.deployments.loops import Models
from tests.deployments.serving import LocalServing, body, client_of, local_serving


class Question(OpenAIRequest):
    words: list[str]


class ReplyChoice(BaseModel):
    drafted: list[bool]
    """For each token, whether it was drafted."""


class Reply(BaseModel):
    id: str
    choices: list[ReplyChoice] = []
    num_tokens: int | None = None


class ReplyWriter:
    """Writes where tokens came from, which OpenAI's completions do not tell."""

    def __init__(self, generation: Generation, model: str) -> None:
        self._id = f"{model}-{generation.id}"

    def choice(self, index: int, completion: Delta) -> ReplyChoice:  # noqa: ARG002
        return ReplyChoice(
            drafted=[record.origin is Origin.ACCEPTED for record in completion.records]
        )

    def answer(self, usage: Usage) -> Reply:
        return Reply(id=self._id, num_tokens=usage.completion_tokens)

    def events(self, index: int, delta: Delta, usage: Usage | None) -> list[Reply]:  # noqa: ARG002
        return [Reply(id=self._id, choices=[self.choice(index, delta)])]

    def usage_event(self, usage: Usage) -> Reply:
        return self.answer(usage)


def answering(service: GenerationService, make_writer: MakeWriter = ReplyWriter) -> FastAPI:
    app = FastAPI()

    @app.post("/answers", response_model=None)
    async def answer(body: Question) -> Response:
        request = body.to_request(model=body.model, prompts=[" ".join(body.words)], n=body.n)
        return Answer(
            service,
            replace(request, num_prompt_logprobs=body.prompt_logprobs),
            make_writer,
            stream_options=body.used_stream_options,
        )

    return app


async def test_a_new_format_is_a_request_and_a_writer(serving: LocalServing) -> None:
    transport = httpx.ASGITransport(answering(serving.service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        question = {"model": "tiny", "words": ["Hello", "you"], "max_tokens": 12, "seed": 3,
                    "ignore_eos": True}  # fmt: skip
        whole = (await client.post("/answers", json={**question, "n": 2})).json()
        assert whole["id"].startswith("tiny-")
        assert whole["num_tokens"] == 24
        assert [len(choice["drafted"]) for choice in whole["choices"]] == [12, 12]
        assert any(whole["choices"][0]["drafted"])
        options = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = await client.post("/answers", json={**question, **options})
        *lines, end = streamed.text.split("\n\n")[:-1]
        assert end == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        drafted = [
            was for event in events for choice in event["choices"] for was in choice["drafted"]
        ]
        assert len(drafted) == events[-1]["num_tokens"] == 12
        assert any(drafted)
    await serving.wait_until_nothing_is_held()


class HeldWriter(ReplyWriter):
    """Writes its second choice only when it is let go on."""

    def __init__(self, generation: Generation, model: str) -> None:
        super().__init__(generation, model)
        self.written: list[int] = []
        self.has_begun = threading.Event()
        self.go_on = threading.Event()

    def choice(self, index: int, completion: Delta) -> ReplyChoice:
        self.written.append(index)
        if index == 1:
            self.has_begun.set()
            assert self.go_on.wait(timeout=30)
        return super().choice(index, completion)


@pytest.fixture
def all_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer is too long to be written on the event loop."""
    monkeypatch.setattr(sequence_module, "MAX_SHOWN_ON_LOOP", 0)


@pytest.mark.usefixtures("all_are_long")
async def test_who_leaves_ends_the_writing_of_a_long_answer(serving: LocalServing) -> None:
    """The choices of a long answer are written beside the event loop, one after the other."""
    writers: list[HeldWriter] = []

    def make_writer(generation: Generation, model: str) -> HeldWriter:
        writers.append(HeldWriter(generation, model))
        return writers[-1]

    transport = httpx.ASGITransport(answering(serving.service, make_writer))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        question: dict[str, Any] = {"words": ["Hello"], "max_tokens": 2, "prompt_logprobs": 1}
        asking = asyncio.create_task(client.post("/answers", json={**question, "n": 4}))
        while not writers:
            await asyncio.sleep(0.01)
        (writer,) = writers
        assert await asyncio.to_thread(writer.has_begun.wait, 30)
        asking.cancel()
        await asyncio.wait([asking])
        writer.go_on.set()
    await serving.wait_until_nothing_is_held()
    assert asking.cancelled()
    assert writer.written == [0, 1]


@pytest.mark.usefixtures("all_are_long")
async def test_long_answers_are_written_one_at_a_time(serving: LocalServing) -> None:
    """Threads share one interpreter with the event loop, which would have its turn too rarely."""
    being_written, most = 0, 0
    lock = threading.Lock()

    class CountedWriter(ReplyWriter):
        def choice(self, index: int, completion: Delta) -> ReplyChoice:
            nonlocal being_written, most
            with lock:
                being_written += 1
                most = max(most, being_written)
            time.sleep(0.01)
            with lock:
                being_written -= 1
            return super().choice(index, completion)

    transport = httpx.ASGITransport(answering(serving.service, CountedWriter))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        question: dict[str, Any] = {"words": ["Hello"], "max_tokens": 2, "prompt_logprobs": 1}
        asking = [client.post("/answers", json={**question, "n": 8}) for _ in range(4)]
        answers = await asyncio.gather(*asking)
    assert [len(answer.json()["choices"]) for answer in answers] == [8] * 4
    assert most == 1


async def test_a_long_body_is_handed_on_in_pieces(
    serving: LocalServing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers_module, "PIECE_LEN", 100)
    app, pieces = answering(serving.service), list[bytes]()

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        async def note(message: Message) -> None:
            pieces.append(message.get("body", b""))
            await send(message)

        await app(scope, receive, note)

    transport = httpx.ASGITransport(noting)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        question = {"words": ["Hello"], "max_tokens": 40, "ignore_eos": True, "n": 2}
        answer = await client.post("/answers", json=question)
    assert [len(choice["drafted"]) for choice in answer.json()["choices"]] == [40, 40]
    assert int(answer.headers["content-length"]) == len(answer.content) == sum(map(len, pieces))
    assert max(map(len, pieces)) == 100


def test_an_answer_is_long_by_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(num_tokens: int, num_top: int) -> tuple[TokenRecord, ...]:
        top = tuple((token, -1.0) for token in range(num_top)) if num_top else None
        record = TokenRecord(
            token_id=1, text="a", text_offset=0, origin=Origin.OWN, top_logprobs=top
        )
        return (record,) * num_tokens

    monkeypatch.setattr(sequence_module, "MAX_SHOWN_ON_LOOP", 60)
    assert not is_long_to_write([Delta(records=shown(60, 0))])
    assert is_long_to_write([Delta(records=shown(61, 0))])
    assert is_long_to_write([Delta(records=shown(13, 4))])
    assert is_long_to_write([Delta(records=(), prompt=shown(13, 4))])
    assert not is_long_to_write([Delta(records=shown(12, 4))])
    assert is_long_to_write([Delta(records=shown(12, 4))] * 2)


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        ("abcde", {"prompt_logprobs": 4}),
        ("abcde", {"echo": True, "logprobs": 4}),
        ("a" * 25, {"echo": True}),
        ("a" * 25, {"return_token_ids": True}),
    ],
)
async def test_what_is_shown_of_prompts_is_bounded(
    prompt: str, fields: dict[str, Any], models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each choice repeats those of its prompt: a few kilobytes could ask for gigabytes."""
    monkeypatch.setattr(request_module, "MAX_SHOWN", 100)
    async with local_serving(models.target) as serving, client_of(serving) as client:
        asked = {**body(max_tokens=2), "prompt": prompt, **fields}
        refused = await client.post("/v1/completions", json={**asked, "n": 5})
        assert refused.status_code == 400
        assert "make 125; at most 100" in refused.json()["error"]["message"]
        served = await client.post("/v1/completions", json={**asked, "n": 4})
        assert served.status_code == 200


async def test_log_probabilities_of_a_whole_answer_are_bounded(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept until all choices have ended; a stream hands them out."""
    monkeypatch.setattr(request_module, "MAX_SHOWN", 100)
    async with local_serving(models.target) as serving, client_of(serving) as client:
        asked = {**body(max_tokens=7), "logprobs": 4, "n": 3}
        refused = await client.post("/v1/completions", json=asked)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert "more than 100 log-probabilities" in error["message"]
        assert error["param"] == "logprobs"
        shorter = await client.post("/v1/completions", json={**asked, "max_tokens": 6})
        assert shorter.status_code == 200
        streamed = await client.post("/v1/completions", json={**asked, "stream": True})
        assert "more than 100" not in streamed.text
        await serving.wait_until_nothing_is_held()
