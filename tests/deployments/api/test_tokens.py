"""/tokenize and /detokenize in process: what a text is in tokens, and back."""

import json
from typing import Any

import httpx
import pytest

from cluster import bundled
from deployments.api.grpc import Rpcs
from deployments.api.http import HttpOptions, make_app
from deployments.api.tandem_pb2 import ChatMessage, Function, TokenizeRequest, Tool
from deployments.router.tokenizer import load_tokenizer
from tests.deployments.loops import Models
from tests.deployments.router.chat.templates import LLAMA
from tests.deployments.scripted import chat_tokenizer, scripted_service
from tests.deployments.serving import (
    MAX_REQUEST_BYTES,
    GrpcContext,
    complete,
    local_serving,
)

ASK = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": SCHEMA}}]
CHATS: dict[str, dict[str, Any]] = {
    "messages": {},
    "tools": {"tools": TOOLS},
    "no opening": {"add_generation_prompt": False},
    "continued": {
        "messages": [ASK, {"role": "assistant", "content": "Well, "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "variables": {"chat_template_kwargs": {"says": "more"}},
}


async def test_a_text_is_the_tokens_of_a_completion_of_it(client: httpx.AsyncClient) -> None:
    response = await client.post("/tokenize", json={"model": "tiny", "prompt": "Hello"})
    answer = response.json()
    assert answer == {
        "count": 5,
        "max_model_len": 256,
        "tokens": answer["tokens"],
        "token_strs": None,
    }
    by_text = await complete(client, prompt="Hello")
    by_ids = await complete(client, prompt=answer["tokens"])
    assert by_text["choices"] == by_ids["choices"]
    back = await client.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": "Hello"}


async def test_tokens_have_names_where_asked_for(client: httpx.AsyncClient) -> None:
    request = {"prompt": "a b", "return_token_strs": True}
    assert (await client.post("/tokenize", json=request)).json()["token_strs"] == ["a", " ", "b"]


async def test_a_text_longer_than_the_context_is_counted(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/tokenize", json={"prompt": "x" * 256})).json()
    assert (answer["count"], answer["max_model_len"]) == (256, 256)


@pytest.mark.parametrize(
    ("path", "request_body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 7}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "gpt-9"}, 404, "model"),
        ("/tokenize", {"prompt": "x" * 10_000}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "add_special_token": True}, 400, "add_special_token"),
        ("/tokenize", {"prompt": "x", "messages": [ASK]}, 400, "messages"),
        ("/tokenize", {"messages": []}, 400, "prompt"),
        ("/tokenize", {"messages": [{"role": "x", "content": ""}]}, 400, "messages.0.role"),
        ("/tokenize", {"messages": [ASK]}, 400, "messages"),  # the model has no template
        (
            "/tokenize",
            {"messages": [ASK], "continue_final_message": True},
            400,
            "continue_final_message",
        ),
        (
            "/tokenize",
            {"messages": [ASK], "parse_special_tokens": False},
            400,
            "parse_special_tokens",
        ),
        ("/tokenize", {"messages": [ASK], "tool_choice": "none"}, 400, "tool_choice"),
        ("/tokenize", {"messages": [ASK], "chat_template": "x"}, 400, "chat_template"),
        ("/detokenize", {"tokens": [5, 97]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": "Hello"}, 400, "tokens"),
        ("/detokenize", {"tokens": [5], "model": "gpt-9"}, 404, "model"),
    ],
    ids=str,
)
async def test_a_wrong_request_names_its_field(
    path: str, request_body: dict[str, Any], status: int, param: str, client: httpx.AsyncClient
) -> None:
    response = await client.post(path, json=request_body)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param


async def test_a_real_tokenizers_special_tokens_come_back(models: Models) -> None:
    tokenizer: Any = load_tokenizer(bundled.resolve(bundled.TARGET_NAME))
    ids = [tokenizer.eos_token_id, *tokenizer.encode("def f():")]
    async with local_serving(models.target, tokenizer=tokenizer) as serving:
        vocab_size = serving.service.model.info.vocab_size
        known = [token for token in ids if token < vocab_size]
        text = await serving.service.detokenize(known)
    assert text == tokenizer.decode(known, skip_special_tokens=False)
    assert text.startswith(tokenizer.eos_token)


@pytest.mark.parametrize("is_parsed", [True, False])
async def test_the_name_of_a_special_token_may_be_a_text(is_parsed: bool) -> None:
    """As in a completion, over HTTP and over gRPC."""
    tokenizer = chat_tokenizer(LLAMA)
    asked = {"prompt": f"a{tokenizer.eos_token}", "parse_special_tokens": is_parsed}
    async with scripted_service(["x"], tokenizer) as service:
        app = make_app(service, HttpOptions(max_request_bytes=MAX_REQUEST_BYTES))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            tokens = (await client.post("/tokenize", json=asked)).json()["tokens"]
            sent = {**asked, "return_token_ids": True, "max_tokens": 1}
            answer = (await client.post("/v1/completions", json=sent)).json()
        rpcs = Rpcs(service, max_request_bytes=MAX_REQUEST_BYTES)
        by_grpc = await rpcs.tokenize(TokenizeRequest(**asked), GrpcContext())
    assert answer["choices"][0]["prompt_token_ids"] == tokens == list(by_grpc.tokens)
    assert (tokenizer.eos_token_id in tokens) is is_parsed
    assert tokenizer.decode(tokens, skip_special_tokens=False) == asked["prompt"]


@pytest.mark.parametrize("name", CHATS)
async def test_a_conversation_is_the_prompt_of_its_chat(name: str) -> None:
    """Over HTTP and over gRPC."""
    chat = {"messages": [ASK], **CHATS[name]}
    tokenizer = chat_tokenizer(LLAMA + "{{ says }}")
    async with scripted_service(["x"], tokenizer) as service:
        app = make_app(service, HttpOptions(max_request_bytes=MAX_REQUEST_BYTES))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            sent = {**chat, "return_token_strs": True}
            counted = (await client.post("/tokenize", json=sent)).json()
            sent = {**chat, "return_token_ids": True, "max_tokens": 1}
            answer = (await client.post("/v1/chat/completions", json=sent)).json()
            more = await client.post("/tokenize", json={**chat, "add_special_tokens": True})
        context = GrpcContext()
        rpcs = Rpcs(service, max_request_bytes=MAX_REQUEST_BYTES)
        by_grpc = await rpcs.tokenize(grpc_request(chat), context)
    assert counted["count"] == answer["usage"]["prompt_tokens"]
    assert counted["tokens"] == answer["choices"][0]["prompt_token_ids"]
    assert counted["token_strs"] == tokenizer.convert_ids_to_tokens(counted["tokens"])
    text = tokenizer.decode(counted["tokens"], skip_special_tokens=False)
    assert more.json()["tokens"] == tokenizer.encode(text, add_special_tokens=True)
    assert context.code is None
    assert list(by_grpc.tokens) == counted["tokens"]


def grpc_request(chat: dict[str, Any]) -> TokenizeRequest:
    fields = {name: value for name, value in chat.items() if isinstance(value, bool)}
    return TokenizeRequest(
        messages=[ChatMessage(**message) for message in chat["messages"]],
        tools=[
            Tool(function=Function(name="get", parameters=json.dumps(SCHEMA)))
            for _ in chat.get("tools", [])
        ],
        chat_template_kwargs=json.dumps(chat.get("chat_template_kwargs", {})),
        **fields,
    )
