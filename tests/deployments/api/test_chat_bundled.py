"""Chats with the bundled target, by its own template."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from cluster import bundled
from deployments.router.chat.template import load_chat_template
from deployments.router.tokenizer import load_tokenizer
from tests.deployments.api.chats import TOOLS, of_openai
from tests.deployments.serving import client_of, local_serving
from workers.end_tokens import find_stop_strings
from workers.model import Model, load_model

MESSAGES = [
    {"role": "system", "content": "Write Python."},
    {"role": "user", "content": "A class for a stack.\nWith push and pop."},
]
GREEDY = {"model": "tiny", "max_tokens": 32, "temperature": 0}


@pytest.fixture(scope="module")
def bundled_model() -> Model:
    return load_model(bundled.resolve(bundled.TARGET_NAME), dtype="float32", device="cpu")


@pytest.fixture
async def bundled_client(bundled_model: Model) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """A client of the bundled pair's target, and its tokenizer."""
    tokenizer = load_tokenizer(bundled.resolve(bundled.TARGET_NAME))
    template = await load_chat_template(tokenizer, path=None)
    async with (
        local_serving(
            bundled_model,
            tokenizer=tokenizer,
            chat_template=template,
            chat_stop=find_stop_strings(bundled.resolve(bundled.TARGET_NAME)),
        ) as serving,
        client_of(serving) as client,
    ):
        client.base_url = httpx.URL("http://test/v1")
        yield client, tokenizer


def rendered(tokenizer: Any, **options: Any) -> str:
    text: str = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=False, **options
    )
    return text


async def test_the_bundled_model_chats_out_of_the_box(
    bundled_client: tuple[httpx.AsyncClient, Any],
) -> None:
    client, tokenizer = bundled_client
    for tools in (None, TOOLS):
        prompt = rendered(tokenizer, tools=tools)
        assert "# A class for a stack.\n# With push and pop.\n" in prompt
        chat = {**GREEDY, "messages": MESSAGES, "tools": tools}
        answer = (await client.post("/chat/completions", json=chat)).json()
        plain = {**GREEDY, "prompt": prompt}
        same = (await client.post("/completions", json=plain)).json()
        assert answer["choices"][0]["message"]["content"] == same["choices"][0]["text"]
        assert answer["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"]


async def test_the_bundled_model_ends_its_answers(
    bundled_client: tuple[httpx.AsyncClient, Any],
) -> None:
    """Most of them, where the next piece of code would begin; some go on and on."""
    client, _ = bundled_client
    question = [{"role": "user", "content": "Read a file."}]
    asked = {"model": "tiny", "messages": question, "seed": 3, "n": 8, "max_tokens": 200}
    choices = (await client.post("/chat/completions", json=asked)).json()["choices"]
    ended = [
        choice["message"]["content"] for choice in choices if choice["finish_reason"] == "stop"
    ]
    assert len(ended) > 2
    assert all(text.strip() and "\n\ndef " not in text for text in ended)


async def test_tokens_are_told_as_of_a_completion(
    bundled_client: tuple[httpx.AsyncClient, Any],
) -> None:
    """Log-probabilities, ids, and those of the prompt, in a stream too."""
    client, tokenizer = bundled_client
    shared = {**GREEDY, "return_token_ids": True, "prompt_logprobs": 1}
    chat = {**shared, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    (choice,) = (await client.post("/chat/completions", json=chat)).json()["choices"]
    plain = {**shared, "prompt": rendered(tokenizer), "logprobs": 2}
    (same,) = (await client.post("/completions", json=plain)).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [token["token"] for token in content] == same["logprobs"]["tokens"]
    assert "".join(token["token"] for token in content) == choice["message"]["content"]
    assert [token["logprob"] for token in content] == pytest.approx(
        same["logprobs"]["token_logprobs"], abs=1e-4
    )
    for token, top in zip(content, same["logprobs"]["top_logprobs"], strict=True):
        assert len(token["top_logprobs"]) == 2
        assert token["top_logprobs"][0]["token"] == token["token"]  # it is greedy
        assert bytes(token["bytes"]).decode() == token["token"]
        assert {t["token"]: t["logprob"] for t in token["top_logprobs"]} == pytest.approx(
            top, abs=1e-4
        )
    for name in ("token_ids", "prompt_token_ids", "prompt_logprobs"):
        assert choice[name] == same[name]
    async with client.stream("POST", "/chat/completions", json={**chat, "stream": True}) as sent:
        lines = [line async for line in sent.aiter_lines() if line.startswith("data: {")]
    chunks = [json.loads(line[6:])["choices"][0] for line in lines]
    streamed = [t for chunk in chunks if chunk["logprobs"] for t in chunk["logprobs"]["content"]]
    assert [token["token"] for token in streamed] == same["logprobs"]["tokens"]
    assert [i for chunk in chunks for i in chunk.get("token_ids", [])] == same["token_ids"]
    assert [c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c] == [
        same["prompt_token_ids"]
    ]


async def test_logprobs_by_openais_client(bundled_client: tuple[httpx.AsyncClient, Any]) -> None:
    client, _ = bundled_client
    answer = await of_openai(client).chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1, max_completion_tokens=4
    )
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.content or []) == 4
