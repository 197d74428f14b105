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

from deployments.api.completions import CompletionRequest
from deployments.api.tandem_pb2 import GenerateRequest
from deployments.api.validation import parse
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
from tests.grammars import ARITHMETIC, PERSON, save_grammar_model
from workers.errors import InvalidRequestError
from workers.grammar import Grammar
from workers.model import Model, load_model

SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "person", "strict": True, "schema": PERSON},
}


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


def asked(**fields: Any) -> Grammar | None:
    return parse(CompletionRequest, body(**fields)).generation_request().sampling.grammar


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "guided_choice": None, "guided_json": None}, None),
        ({"structured_outputs": {"json": None, "disable_any_whitespace": False}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
        ({"response_format": {"type": "json_object", "schema": None}}, Grammar.json_object()),
        (
            {"response_format": {"type": "json_object", "schema": PERSON}},
            Grammar.json_schema(PERSON),
        ),
        (
            {"response_format": {"type": "json_schema", "schema": PERSON}},
            Grammar.json_schema(PERSON),
        ),
        ({"response_format": {**SCHEMA, "type": "json_object"}}, Grammar.json_schema(PERSON)),
        ({"response_format": SCHEMA}, Grammar.json_schema(PERSON)),
        ({"structured_outputs": {"json": PERSON}}, Grammar.json_schema(PERSON)),
        ({"structured_outputs": {"json": json.dumps(PERSON)}}, Grammar.json_schema(PERSON)),
        ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
        ({"structured_outputs": {"regex": "a+"}}, Grammar.regex("a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar.choice(["a", "b"])),
        ({"structured_outputs": {"grammar": ARITHMETIC}}, Grammar.lark(ARITHMETIC)),
        ({"guided_json": PERSON}, Grammar.json_schema(PERSON)),
        ({"guided_json": json.dumps(PERSON)}, Grammar.json_schema(PERSON)),
        ({"guided_regex": "a+", "response_format": {"type": "text"}}, Grammar.regex("a+")),
        ({"guided_choice": ["a", "b"]}, Grammar.choice(["a", "b"])),
        ({"guided_grammar": ARITHMETIC, "guided_decoding_backend": "x"}, Grammar.lark(ARITHMETIC)),
    ],
    ids=str,
)
def test_the_fields_say_the_same_in_several_ways(
    fields: dict[str, Any], grammar: Grammar | None
) -> None:
    assert asked(**fields) == grammar


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            "must be one of text, json_",
        ),
        ({"response_format": {}}, "response_format.type", "is null"),
        ({"response_format": "json"}, "response_format", "it must be an object"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema",
            "JSON schema",
        ),
        (
            {"response_format": {"type": "json_object", "schema": 5}},
            "response_format.schema",
            "is 5: it must be a JSON schema",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": PERSON}},
            "response_format.json_schema.schema",
            "is null: it must be a JSON schema",
        ),
        (
            {"response_format": {"type": "text", "schema": PERSON}},
            "response_format.schema",
            "but response_format.type is 'text'; make it 'json_schema'",
        ),
        (
            {"response_format": {**SCHEMA, "schema": PERSON}},
            "response_format.json_schema.schema",
            "give one of them",
        ),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "it is not served"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to 1024 strings"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice", "1 to 1024 strings"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "it must be a string"),
        (
            {"structured_outputs": {"json": PERSON, "whitespace_pattern": 5}},
            "structured_outputs.whitespace_pattern",
            "is 5: it must be a regular expression",
        ),
        (
            {"structured_outputs": {"json": PERSON, "whitespace_pattern": "\ud83d"}},
            "structured_outputs.json",
            "surrogate",
        ),
        (
            {"structured_outputs": {"json": PERSON, "disable_any_whitespace": 1}},
            "structured_outputs.disable_any_whitespace",
            "is 1: it must be true or false",
        ),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
            "not about a regex",
        ),
        (
            {"structured_outputs": {"whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "put the schema into",
        ),
        (
            {"structured_outputs": {"json": {"x-guidance": 5}, "whitespace_pattern": " "}},
            "structured_outputs.json",
            "its x-guidance must be an object",
        ),
        ({"guided_json": True}, "guided_json", "is true: it must be a JSON schema"),
        ({"guided_json": "{"}, "guided_json", "is no JSON"),
        ({"guided_json": "[1]"}, "guided_json", "which is an object"),
        ({"guided_regex": ""}, "guided_regex", "it is empty"),
        ({"guided_regex": "a\ud83d"}, "guided_regex", "surrogate"),
        ({"guided_regex": "a" * 70_000}, "guided_regex", "at most 65536 characters"),
        ({"guided_json": {"enum": ["a" * 70_000]}}, "guided_json", "at most 65536 are taken"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice", "at most 1024 items"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "give one of them"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex",
            "response_format and guided_regex both",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_fields_are_named(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        asked(**fields)
    assert caught.value.field == field
    assert words in str(caught.value)


@pytest.mark.parametrize("temperature", [0, 1])
async def test_what_is_asked_for_is_answered(client: httpx.AsyncClient, temperature: float) -> None:
    more = {"temperature": temperature, "max_tokens": 120, "ignore_eos": False}
    (choice,) = (await complete(client, response_format=SCHEMA, **more))["choices"]
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
            extra_body={"response_format": SCHEMA},
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
