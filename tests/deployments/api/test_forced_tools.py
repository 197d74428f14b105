"""Calls of tools that a client forces, over HTTP and gRPC: by real, if tiny, workers."""

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import jsonschema
import pytest
from openai import AsyncOpenAI
from transformers import AutoTokenizer

from deployments.api.tandem_pb2 import ChatMessage, ChatRequest, Function, Tool
from deployments.router.chat.template import ChatTemplate
from tests.deployments.api.chats import joined
from tests.deployments.serving import GrpcContext, LocalServing, client_of, local_serving
from tests.grammars import PERSON, save_grammar_model
from workers.model import Model, load_model

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | length if tools }}"
HERMES = TEMPLATE + "{# <tool_call> #}"
THINKING = HERMES + "{# <think> </think> #}"
SCHEMAS = {"store": PERSON, "stop": {"type": "object", "maxProperties": 0}}
TOOLS = [
    {"type": "function", "function": {"name": "store", "parameters": PERSON}},
    {"type": "function", "function": {"name": "stop"}},
]
NAMED = {"type": "function", "function": {"name": "store"}}
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    name = save_grammar_model(tmp_path_factory.mktemp("m"), family=None)
    return load_model(name, dtype="float32", device="cpu")


@asynccontextmanager
async def served(model: Model, template: str = HERMES) -> AsyncIterator[LocalServing]:
    tokenizer = AutoTokenizer.from_pretrained(model.name)
    chat_template = ChatTemplate(tokenizer, source=template)
    async with local_serving(model, tokenizer=tokenizer, chat_template=chat_template) as serving:
        yield serving
        await serving.wait_until_nothing_is_held()


@pytest.fixture
async def client(model: Model) -> AsyncIterator[httpx.AsyncClient]:
    async with served(model) as serving, client_of(serving) as client:
        yield client


def body(**fields: Any) -> dict[str, Any]:
    defaults = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 200, "seed": 5}
    return {**defaults, "temperature": 1, **fields}


async def choices(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    response = await client.post("/v1/chat/completions", json=body(**fields))
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["choices"]
    return found


def check_calls(message: dict[str, Any]) -> list[str]:
    """The names of a message's calls, whose arguments are valid."""
    assert message["content"] is None
    functions = [call["function"] for call in message["tool_calls"]]
    for function in functions:
        jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])
    return [function["name"] for function in functions]


@pytest.mark.parametrize("template", [HERMES, TEMPLATE], ids=["hermes", "unknown"])
async def test_required_calls_come_in_any_case(model: Model, template: str) -> None:
    """Calls come of models that know no tools, too."""
    async with served(model, template) as serving, client_of(serving) as client:
        for choice in await choices(client, tool_choice="required", n=4):
            if choice["finish_reason"] == "length":  # a model of noise may go on and on
                continue
            assert choice["finish_reason"] == "tool_calls"
            assert check_calls(choice["message"])
        one = {"tool_choice": "required", "parallel_tool_calls": False, "n": 4, "seed": 1}
        for choice in await choices(client, **one):
            assert choice["finish_reason"] == "tool_calls"
            assert len(check_calls(choice["message"])) == 1


@pytest.mark.parametrize("template", [HERMES, TEMPLATE], ids=["hermes", "unknown"])
async def test_a_named_function_is_called_once(model: Model, template: str) -> None:
    """And the reason is `stop`, as OpenAI and vLLM have it."""
    async with served(model, template) as serving, client_of(serving) as client:
        for choice in await choices(client, tool_choice=NAMED, n=4):
            assert check_calls(choice["message"]) == ["store"]
            assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_a_stream_has_the_arguments_piece_by_piece(
    client: httpx.AsyncClient, choice: Any
) -> None:
    fields = {"tools": TOOLS[:1], "tool_choice": choice, "parallel_tool_calls": False}
    (whole,) = await choices(client, **fields)
    request = body(stream=True, **fields)
    response = await client.post("/v1/chat/completions", json=request)
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    events = [json.loads(line) for line in lines[:-1]]
    streamed = joined(events)
    assert streamed["tool_calls"] == [call["function"] for call in whole["message"]["tool_calls"]]
    assert streamed["finish_reason"] == whole["finish_reason"]
    assert streamed["content"] == ""
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert sum("tool_calls" in delta for delta in deltas) > 2


async def test_thoughts_come_first_where_the_template_has_such(model: Model) -> None:
    async with served(model, THINKING) as serving, client_of(serving) as client:
        found = await choices(
            client, tool_choice=NAMED, n=8, seed=2, max_tokens=150, logit_bias={"0": 5}
        )
    messages = [choice["message"] for choice in found if choice["finish_reason"] == "stop"]
    assert messages
    assert all(check_calls(message) == ["store"] for message in messages)


async def test_none_forces_nothing(client: httpx.AsyncClient) -> None:
    (choice,) = await choices(client, tool_choice="none", max_tokens=8)
    (plain,) = await choices(client, tools=None, max_tokens=8)
    assert choice == plain


async def test_a_function_without_parameters_takes_none(client: httpx.AsyncClient) -> None:
    named = {"type": "function", "function": {"name": "stop"}}
    (choice,) = await choices(client, tool_choice=named)
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_a_schema_that_cannot_be_followed_is_a_400(
    client: httpx.AsyncClient, choice: Any
) -> None:
    schema = {"type": "object", "properties": {"at": {"not": {"type": "string"}}}}
    tools = [{"type": "function", "function": {"name": "store", "parameters": schema}}]
    for stream in (False, True):
        response = await client.post(
            "/v1/chat/completions", json=body(tools=tools, tool_choice=choice, stream=stream)
        )
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "tools")
        assert "the parameters of 'store': " in error["message"]
        assert error["message"].endswith("; change that, or let tool_choice be auto")
    assert await choices(client, tools=tools, max_tokens=2)


async def test_a_schema_with_a_number_that_json_has_not_is_a_400(
    client: httpx.AsyncClient,
) -> None:
    tool = {"name": "store", "parameters": {"properties": {"at": {"maximum": math.inf}}}}
    content = json.dumps(body(tools=[{"type": "function", "function": tool}], tool_choice=NAMED))
    response = await client.post(
        "/v1/chat/completions", content=content, headers={"Content-Type": "application/json"}
    )
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools")
    assert error["message"] == "tools has a schema with a number that is not finite"


async def test_openais_client_parses_what_was_forced(model: Model) -> None:
    async with served(model) as serving:
        transport = httpx.ASGITransport(serving.app())
        http = httpx.AsyncClient(transport=transport, base_url="http://test/v1")
        async with (
            AsyncOpenAI(base_url="http://test/v1", api_key="x", http_client=http) as openai,
            openai.chat.completions.stream(
                model="tiny",
                messages=MESSAGES,  # type: ignore[arg-type]
                tools=TOOLS,  # type: ignore[arg-type]
                tool_choice=NAMED,  # type: ignore[arg-type]
                max_tokens=200,
                seed=1,
            ) as events,
        ):
            answer = await events.get_final_completion()
    (call,) = answer.choices[0].message.tool_calls or []
    jsonschema.validate(json.loads(call.function.arguments), PERSON)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_grpc_forces_the_same_calls(model: Model, choice: Any) -> None:
    request = ChatRequest(
        messages=[ChatMessage(role="user", content="Hi")],
        tools=[
            Tool(function=Function(name="store", parameters=json.dumps(PERSON))),
            Tool(function=Function(name="stop")),
        ],
        tool_choice=choice if isinstance(choice, str) else json.dumps(choice),
        parallel_tool_calls=False,
        max_tokens=200,
        seed=5,
        temperature=1,
    )
    fields = {"tool_choice": choice, "parallel_tool_calls": False}
    async with served(model) as serving, client_of(serving) as client:
        (expected,) = await choices(client, **fields)
        context = GrpcContext()
        (found,) = (await serving.rpcs.chat(request, context)).choices
        assert context.code is None
        chunks = [chunk async for chunk in serving.rpcs.chat_stream(request, GrpcContext())]
        request.tool_choice = "{"
        await serving.rpcs.chat(request, context)
    (call,) = found.message.tool_calls
    function = {"name": call.function.name, "arguments": call.function.arguments}
    assert [function] == [call["function"] for call in expected["message"]["tool_calls"]]
    assert found.finish_reason == expected["finish_reason"] == chunks[-1].finish_reason
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert context.details == "tool_choice is '{': it must be an object, as JSON"
