"""/tokenize and /detokenize in process: what a text is in tokens, and back."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from cluster import bundled
from deployments.router.tokenizer import load_tokenizer
from tests.deployments.loops import Models
from tests.deployments.serving import client_of, complete, local_serving


@pytest.fixture
async def client(models: Models) -> AsyncIterator[httpx.AsyncClient]:
    async with local_serving(models.target) as serving, client_of(serving) as client:
        yield client


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
