"""Structured output over HTTP and gRPC: what is asked for in which words, and what is refused."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema
import pytest
from grpc import StatusCode
from openai import AsyncOpenAI
from transformers import AutoTokenizer

from deployments.api.tandem_pb2 import GenerateRequest
from deployments.router.chat.template import ChatTemplate
from tests.deployments.router.chat.templates import THINKING
from tests.deployments.serving import (
    GrpcContext,
    LocalServing,
    body,
    client_of,
    complete,
    local_serving,
    stream,
)
from tests.grammars import ARITHMETIC, PERSON, RESPONSE_FORMAT, save_grammar_model
from workers.errors import InvalidRequestError
from workers.model import Model, load_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(
        save_grammar_model(tmp_path_factory.mktemp("m")), dtype="float32", device="cpu"
    )


@pytest.fixture
async def serving(model: Model) -> AsyncIterator[LocalServing]:
    tokenizer = AutoTokenizer.from_pretrained(model.name)
    async with local_serving(model, tokenizer=tokenizer) as serving:
        yield serving


@pytest.mark.parametrize("temperature", [0, 1])
async def test_what_is_asked_for_is_answered(client: httpx.AsyncClient, temperature: float) -> None:
    more = {"temperature": temperature, "max_tokens": 120, "ignore_eos": False}
    (choice,) = (await complete(client, response_format=RESPONSE_FORMAT, **more))["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["text"]), PERSON)
    (choice,) = (await complete(client, guided_choice=["left", "right"], **more))["choices"]
    assert choice["text"] in ("left", "right")
    (choice,) = (await complete(client, guided_regex="[0-9]{4}-[0-9]{2}", **more))["choices"]
    assert (len(choice["text"]), choice["text"][4]) == (7, "-")


SPACINGS: dict[str, dict[str, Any]] = {
    "none": {"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}},
    "newlines": {"structured_outputs": {"json": PERSON, "whitespace_pattern": "\n"}},
    "of the schema": {"guided_json": {**PERSON, "x-guidance": {"whitespace_flexible": False}}},
}


@pytest.mark.parametrize("name", SPACINGS)
async def test_the_white_space_of_json_may_be_bounded(client: httpx.AsyncClient, name: str) -> None:
    """The random model fills its JSON with white space where it may."""
    more = {"temperature": 1, "max_tokens": 120, "ignore_eos": False}
    (choice,) = (await complete(client, **SPACINGS[name], **more))["choices"]
    value = json.loads(choice["text"])
    jsonschema.validate(value, PERSON)
    text = choice["text"].replace("\n", "") if name == "newlines" else choice["text"]
    assert len(text) == len(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


async def test_n_completions_of_several_prompts_each_match(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt=["one", "two"], n=3, guided_regex="[a-d]{6}", seed=1)
    texts = [choice["text"] for choice in answer["choices"]]
    assert all(len(text) == 6 and set(text) <= set("abcd") for text in texts)
    assert len(set(texts)) > 1


async def test_openais_client_gets_json(serving: LocalServing) -> None:
    http = httpx.AsyncClient(
        transport=httpx.ASGITransport(serving.app()), base_url="http://test/v1"
    )
    async with AsyncOpenAI(base_url="http://test/v1", api_key="x", http_client=http) as client:
        answer = await client.completions.create(
            model="tiny",
            prompt="A person:",
            max_tokens=120,
            seed=4,
            extra_body={"response_format": RESPONSE_FORMAT},
        )
    jsonschema.validate(json.loads(answer.choices[0].text), PERSON)


async def test_a_hostile_grammar_is_refused_and_others_go_on(client: httpx.AsyncClient) -> None:
    for is_stream in (False, True):
        response = await client.post(
            "/v1/completions",
            json=body(guided_regex="(" * 999 + ")" * 999, stream=is_stream),
        )
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "guided_regex")
        assert error["message"].startswith("the grammar cannot be used: ")
    for impossible in ({"guided_regex": r"[^\s\S]"}, {"guided_grammar": 'start: start "a"'}):
        response = await client.post("/v1/completions", json=body(**impossible))
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "the grammar cannot be used: no text fits it"
    assert (await complete(client))["choices"]


async def test_a_grammar_that_compiles_without_end_is_refused(client: httpx.AsyncClient) -> None:
    schema = {"type": "integer", "multipleOf": 2_147_483_648}
    response = await client.post("/v1/completions", json=body(guided_json=schema))
    assert response.status_code == 400
    assert response.json()["error"]["message"] == (
        "the grammar cannot be used: compiling it takes more than 32 MiB; make it simpler"
    )
    assert (await complete(client))["choices"]


NO_TOKEN_LEFT: dict[str, dict[str, Any]] = {
    "the end is banned": {"guided_choice": ["left", "right"], "min_tokens": 100},
    "a word is banned": {"guided_regex": "a{60}", "bad_words": ["a"]},
}


@pytest.mark.parametrize("what", NO_TOKEN_LEFT)
async def test_what_a_request_leaves_no_token_for_is_its_own_fault(
    serving: LocalServing, client: httpx.AsyncClient, what: str
) -> None:
    fields = {**NO_TOKEN_LEFT[what], "max_tokens": 100}
    whole = await client.post("/v1/completions", json=body(**fields, ignore_eos=False))
    assert whole.status_code == 400, whole.text
    told = whole.json()["error"]
    assert (told["type"], told["param"]) == ("invalid_request_error", next(iter(fields)))
    assert "the grammar and the other parameters of the request leave none" in told["message"]
    *_, last = await stream(client, **fields, ignore_eos=False)
    assert last["error"] == told

    context = GrpcContext()
    request = GenerateRequest(text="Hello", seed=3, **fields)
    await serving.rpcs.generate(request, context)
    assert (context.code, context.details) == (StatusCode.INVALID_ARGUMENT, told["message"])
    streamed = GrpcContext()
    with pytest.raises(InvalidRequestError):
        _ = [chunk async for chunk in serving.rpcs.generate_stream(request, streamed)]
    assert (streamed.code, streamed.details) == (context.code, context.details)
    await serving.wait_until_nothing_is_held()


async def test_a_tokenizer_without_bytes_is_told(model: Model) -> None:
    async with local_serving(model) as serving, client_of(serving) as client:
        response = await client.post("/v1/completions", json=body(guided_regex="a"))
        assert response.status_code == 400
        assert "no tokenizer that says the bytes of its tokens" in response.text


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": json.dumps(PERSON)},
        {"guided_regex": "[ab]{5}"},
        {"guided_choice": ["x", "y"]},
        {"guided_grammar": ARITHMETIC},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_grpc_has_the_fields_too(
    serving: LocalServing, client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    context = GrpcContext()
    request = GenerateRequest(text="Hello", max_tokens=60, seed=3, temperature=0.8, **fields)
    by_grpc = await serving.rpcs.generate(request, context)
    assert context.code is None
    (choice,) = (
        await complete(client, max_tokens=60, seed=3, temperature=0.8, ignore_eos=False, **fields)
    )["choices"]
    assert by_grpc.text == choice["text"]


@pytest.mark.parametrize("can_think", [True, False])
async def test_a_chat_may_think_before_it_answers(model: Model, can_think: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model.name)
    template = ChatTemplate(tokenizer, source=THINKING)
    async with (
        local_serving(model, tokenizer=tokenizer, chat_template=template) as serving,
        client_of(serving) as client,
    ):
        response = await client.post(
            "/v1/chat/completions",
            json={
                "messages": [{"role": "user", "content": "Left or right?"}],
                "max_tokens": 100,
                "seed": 2,
                "structured_outputs": {"choice": ["left", "right"]},
                "chat_template_kwargs": {"enable_thinking": can_think},
            },
        )
    (choice,) = response.json()["choices"]
    message = choice["message"]
    assert message["content"] in ("left", "right") or choice["finish_reason"] == "length"
    if not can_think:
        assert message["content"] in ("left", "right")


@pytest.mark.parametrize("mode", ["off", "auto"])
async def test_a_choice_may_have_the_name_of_the_token_that_ends_a_text(
    mode: str, client: httpx.AsyncClient
) -> None:
    fields: dict[str, Any] = {"guided_choice": ["the <|end|> of it"], "ignore_eos": False}
    answer = await complete(client, max_tokens=40, speculation={"mode": mode}, **fields)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("the <|end|> of it", "stop")
    assert (answer["usage"]["speculation"]["accepted_tokens"] > 0) == (mode == "auto")
