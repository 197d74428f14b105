"""Chats over gRPC, which say what HTTP's say."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest

from deployments.api.grpc import Rpcs
from deployments.api.http import HttpOptions, make_app
from deployments.api.tandem_pb2 import ChatMessage, ChatRequest, Function, Tool
from deployments.router.service import GenerationService
from tests.deployments.api.chats import ANSWERS, SPECIAL
from tests.deployments.scripted import MODEL, chat_tokenizer, scripted_service
from tests.deployments.serving import GrpcContext
from workers.errors import InvalidRequestError

MAX_REQUEST_BYTES = 20_000
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 3}}}
TOOLS = [
    Tool(function=Function(name=name, description="It.", parameters=json.dumps(SCHEMA)))
    for name in ("get", "put")
]
HTTP_TOOLS = [
    {"type": "function", "function": {"name": name, "description": "It.", "parameters": SCHEMA}}
    for name in ("get", "put")
]
ASK = [ChatMessage(role="user", content="Hi")]


@asynccontextmanager
async def served(name: str, **options: Any) -> AsyncIterator[GenerationService]:
    template, answer = ANSWERS[name]
    tokenizer = chat_tokenizer(template, SPECIAL)
    async with scripted_service([answer], tokenizer, **options) as service:
        yield service
        assert service.num_unfinished == 0


def rpcs(service: GenerationService) -> Rpcs:
    return Rpcs(service, max_request_bytes=MAX_REQUEST_BYTES)


async def by_http(service: GenerationService, **fields: Any) -> dict[str, Any]:
    """The only choice of HTTP's answer."""
    app = make_app(service, HttpOptions(max_request_bytes=MAX_REQUEST_BYTES))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    (choice,) = answer["choices"]
    return {**choice, "usage": answer["usage"]}


@pytest.mark.parametrize("name", ANSWERS)
async def test_the_answer_is_that_of_http(name: str) -> None:
    async with served(name) as service:
        expected = await by_http(service, tools=HTTP_TOOLS)
        context = GrpcContext()
        answer = await rpcs(service).chat(ChatRequest(messages=ASK, tools=TOOLS), context)
    assert context.code is None
    (choice,) = answer.choices
    message = expected["message"]
    assert choice.message.role == "assistant"
    content = choice.message.content if choice.message.HasField("content") else None
    assert content == message["content"]
    assert choice.message.reasoning_content == (message.get("reasoning_content") or "")
    assert [
        {"name": call.function.name, "arguments": call.function.arguments}
        for call in choice.message.tool_calls
    ] == [call["function"] for call in message.get("tool_calls", [])]
    assert all(call.id and call.type == "function" for call in choice.message.tool_calls)
    assert choice.finish_reason == expected["finish_reason"]
    assert answer.usage.completion_tokens == expected["usage"]["completion_tokens"]
    assert answer.usage.prompt_tokens == expected["usage"]["prompt_tokens"]
    details = expected["usage"]["completion_tokens_details"]
    assert answer.usage.HasField("reasoning_tokens") == ("reasoning_tokens" in details)
    assert answer.usage.reasoning_tokens == details.get("reasoning_tokens", 0)


@pytest.mark.parametrize("commit_len", [1, 3, 8])
@pytest.mark.parametrize("name", ANSWERS)
async def test_a_stream_says_what_the_whole_answer_says(name: str, commit_len: int) -> None:
    request = ChatRequest(messages=ASK, tools=TOOLS)
    async with served(name, commit_len=commit_len) as service:
        answer = await rpcs(service).chat(request, GrpcContext())
        (choice,) = answer.choices
        chunks = [chunk async for chunk in rpcs(service).chat_stream(request, GrpcContext())]
    assert "".join(chunk.content for chunk in chunks) == choice.message.content
    assert "".join(chunk.reasoning_content for chunk in chunks) == choice.message.reasoning_content
    calls: list[dict[str, str]] = []
    for piece in (piece for chunk in chunks for piece in chunk.tool_calls):
        if piece.index == len(calls):
            assert piece.id
            calls.append({"name": piece.function.name, "arguments": ""})
        calls[piece.index]["arguments"] += piece.function.arguments
    assert calls == [
        {"name": call.function.name, "arguments": call.function.arguments}
        for call in choice.message.tool_calls
    ]
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [
        choice.finish_reason
    ]
    assert [token for chunk in chunks for token in chunk.token_ids] == list(choice.token_ids)
    assert [chunk.HasField("usage") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage.HasField("reasoning_tokens") == (name == "thoughts")
    assert chunks[-1].usage.reasoning_tokens == answer.usage.reasoning_tokens


async def test_a_conversation_with_calls_is_the_prompt_of_http() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": "Ann"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": ""},
    ]
    async with served("calls") as service:
        expected = await by_http(
            service,
            messages=messages,
            tools=HTTP_TOOLS,
            return_token_ids=True,
            chat_template_kwargs={"enable_thinking": False},
        )
        request = ChatRequest(
            messages=[ChatMessage(**message) for message in messages],  # type: ignore[arg-type]
            tools=TOOLS,
            return_token_ids=True,
            chat_template_kwargs='{"enable_thinking": false}',
        )
        (choice,) = (await rpcs(service).chat(request, GrpcContext())).choices
    assert [record.id for record in choice.prompt] == expected["prompt_token_ids"]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ChatRequest(), "messages is \\[\\]"),
        (ChatRequest(messages=[ChatMessage(content="a")]), "role is missing"),
        (ChatRequest(messages=[ChatMessage(role="x", content="a")]), "role is 'x': it must be one"),
        (ChatRequest(messages=ASK, temperature=7), "temperature is 7.0: it must be a number from"),
        (ChatRequest(messages=ASK, chat_template_kwargs="[]"), "chat_template_kwargs is '\\[\\]'"),
        (
            ChatRequest(messages=ASK, tools=[Tool(function=Function(name="f", parameters="{"))]),
            "tools.0.parameters is '{': it must be an object, as JSON",
        ),
        (ChatRequest(messages=ASK, tools=[Tool()]), "tool 0 has no function with a name"),
        (ChatRequest(messages=[ChatMessage(role="user", content="a" * 20_000)]), "at most 20000"),
    ],
)
async def test_wrong_chats_set_the_status(request_: ChatRequest, words: str) -> None:
    async with served("text") as service:
        context = GrpcContext()
        with pytest.raises(InvalidRequestError, match=words):
            await anext(aiter(rpcs(service).chat_stream(request_, context)))
        assert context.code is grpc.StatusCode.INVALID_ARGUMENT
        context = GrpcContext()
        await rpcs(service).chat(request_, context)
        assert context.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_model_without_a_template_says_what_to_do() -> None:
    async with scripted_service(["a"], chat_tokenizer(None)) as service:
        context = GrpcContext()
        await rpcs(service).chat(ChatRequest(messages=ASK), context)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "chat_template" in context.details
