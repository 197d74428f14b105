"""Odd bodies: numbers of thousands of digits, values nested nearly too deep, other encodings."""

import itertools
import json

import httpx
import pytest

from deployments.api.completions import CompletionRequest
from tests.deployments.serving import body, complete

JSON = {"content-type": "application/json"}
MOST_DIGITS = 4300
"""Python reads and writes integers of as many digits, and no more."""
INTEGERS = [
    name
    for name, schema in CompletionRequest.model_json_schema()["properties"].items()
    if "integer" in {part.get("type") for part in [schema, *schema.get("anyOf", [])]}
]


async def refusal(client: httpx.AsyncClient, content: str) -> str:
    """The message of a 400, which is not long; the server goes on."""
    response = await client.post("/v1/completions", content=content, headers=JSON)
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert len(message) < 400  # it shows the start and the end of what is long
    await complete(client, max_tokens=1)
    return str(message)


async def test_integers_of_thousands_of_digits(client: httpx.AsyncClient) -> None:
    for name, sign in itertools.product(INTEGERS, ("", "-")):
        request = json.dumps(body(**{name: 0}))
        assert f'"{name}": 0' in request
        number = sign + "9" * MOST_DIGITS
        message = await refusal(client, request.replace(f'"{name}": 0', f'"{name}": {number}'))
        assert name in message


async def test_values_nested_nearly_too_deep(client: httpx.AsyncClient) -> None:
    for depth in (100, 500, *range(900, 1000)):
        nested = "[" * depth + "1" + "]" * depth
        await refusal(client, f'{{"model": "m", "prompt": {nested}}}')


async def test_a_long_path_is_not_repeated_in_full(client: httpx.AsyncClient) -> None:
    for path in ("/v1/models/", "/v1/"):
        response = await client.get(path + "a" * 5000)
        assert response.status_code == 404
        assert len(response.json()["error"]["message"]) < 1100


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/metrics", "Ray exports the metrics"),
        ("/completions", "did you mean /v1/completions?"),
        ("/models", "did you mean /v1/models?"),
        ("/v1/embeddings", "models that embed are not served"),
    ],
)
async def test_who_looks_for_what_is_not_here_is_told_where_it_is(
    client: httpx.AsyncClient, path: str, words: str
) -> None:
    response = await client.get(path)
    assert response.status_code == 404
    assert words in response.json()["error"]["message"]


async def test_a_body_may_be_in_any_encoding_of_json(client: httpx.AsyncClient) -> None:
    expected = (await complete(client, prompt="Hello", seed=1))["choices"]
    for encoding in ("utf-8-sig", "utf-16", "utf-32-be"):
        content = json.dumps(body(prompt="Hello", seed=1), ensure_ascii=False).encode(encoding)
        response = await client.post("/v1/completions", content=content, headers=JSON)
        assert response.json()["choices"] == expected, encoding


async def test_a_body_of_nothing_is_no_json(client: httpx.AsyncClient) -> None:
    for content in ("\0\0", "\0" * 1000, "\ufeff", " \n"):
        assert "JSON" in await refusal(client, content)
