"""Random chats: whatever is sent is answered or told what is wrong, and nothing stays."""

import random
from typing import Any

import httpx
import pytest

from deployments.api.http import HttpOptions, make_app
from tests.deployments.router.chat.templates import HERMES, LLAMA, MISTRAL, THINKING
from tests.deployments.scripted import MODEL, chat_tokenizer, scripted_service

NUM_CASES = 150
CALL = '<tool_call>{"name": "get", "arguments": {"x": "世界"}}</tool_call>'
JUNK: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**70,
    1e300,
    "",
    "x",
    "é世\U0001f469",
    "</think>",
    "{{ messages }}",
    [],
    [None],
    {},
    {"type": "text", "text": "x"},
    [{"type": "text", "text": "x"}],
    [{"type": "image_url"}],
    {"type": "function", "function": {"name": "get"}},
    [[[[]]]],
    "\x00",
    "user",
    "assistant",
    "tool",
)
NAMES = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning_content",
    "type",
    "text",
    "id",
    "function",
    "arguments",
    "index",
)
FIELDS = (
    "messages",
    "tools",
    "tool_choice",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "stop",
    "stream",
    "stream_options",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "parallel_tool_calls",
    "reasoning_effort",
    "temperature",
    "logit_bias",
    "seed",
    "response_format",
)


def draw_message(rng: random.Random) -> Any:
    role = rng.choice(["system", "developer", "user", "assistant", "tool"])
    message: dict[str, Any] = {"role": role, "content": rng.choice(["Hi", "世界", [], JUNK[15]])}
    if role == "tool":
        message["tool_call_id"] = "c1"
    if role == "assistant" and rng.random() < 0.5:
        arguments = rng.choice(["", "{}", "{", "[1]", '{"a": {"b": 1}}', "[" * 900])
        message["tool_calls"] = [
            {"id": "c1", "type": "function", "function": {"name": "get", "arguments": arguments}}
        ]
    if rng.random() < 0.3:
        message[rng.choice(NAMES)] = rng.choice(JUNK)
    return message


def draw_body(rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [draw_message(rng) for _ in range(rng.randint(1, 4))],
        "max_tokens": rng.choice([1, 7, 40, None]),
        "stream": rng.random() < 0.5,
    }
    if rng.random() < 0.5:
        body["tools"] = [{"type": "function", "function": {"name": "get"}}]
    if rng.random() < 0.4:
        body[rng.choice(FIELDS)] = rng.choice(JUNK)
    if rng.random() < 0.1:
        body["chat_template_kwargs"] = {
            rng.choice(["enable_thinking", "tools", "bos_token", "x"]): 5
        }
    return body


@pytest.mark.parametrize(
    "template", [HERMES, THINKING, LLAMA, MISTRAL], ids=["hermes", "thinking", "llama", "mistral"]
)
async def test_no_chat_is_an_error_of_ours(template: str) -> None:
    rng = random.Random(template)
    statuses = []
    async with scripted_service([CALL], chat_tokenizer(template)) as service:
        transport = httpx.ASGITransport(make_app(service, HttpOptions(max_request_bytes=20_000)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for _ in range(NUM_CASES):
                body = draw_body(rng)
                response = await client.post("/v1/chat/completions", json=body)
                statuses.append(response.status_code)
                assert response.status_code in (200, 400), (body, response.text)
                assert "internal error" not in response.text, body
                if response.status_code == 400:
                    assert response.json()["error"]["message"], body
        assert service.num_unfinished == 0
    assert {*statuses} == {200, 400}
