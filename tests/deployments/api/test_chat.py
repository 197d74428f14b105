"""Chat completions over HTTP, by OpenAI's own client and as they stand on the wire."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from deployments.api.http import HttpOptions, make_app
from tests.deployments.api.chats import ANSWERS, CALL, CITY, SPECIAL, TOOLS, joined, of_openai
from tests.deployments.router.chat.templates import HERMES, MISTRAL, THINKING
from tests.deployments.scripted import MODEL, chat_tokenizer, scripted_service

ASK = [{"role": "user", "content": "Hi"}]


@asynccontextmanager
async def served(
    *answers: str, template: str | None = HERMES, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server whose model writes these answers."""
    tokenizer = chat_tokenizer(template, SPECIAL)
    async with scripted_service(answers, tokenizer, **options) as service:
        transport = httpx.ASGITransport(make_app(service, HttpOptions(max_request_bytes=20_000)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test/v1") as client:
            yield client
        assert service.num_unfinished == 0


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """The only choice of an answer."""
    response = await client.post("/chat/completions", json=body(**fields))
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": ASK, **fields}


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    response = await client.post("/chat/completions", json=body(stream=True, **fields))
    assert response.status_code == 200, response.text
    *lines, end = [line for line in response.text.split("\n\n") if line]
    assert end == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def whole(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "tool_calls": [call["function"] for call in message.get("tool_calls", [])],
        "finish_reason": choice["finish_reason"],
    }


@pytest.mark.parametrize("commit_len", range(1, 9))
@pytest.mark.parametrize("name", ANSWERS)
async def test_a_stream_says_what_the_whole_answer_says(name: str, commit_len: int) -> None:
    """Whatever the tokens of a commit, with stop strings and without, and cut off too."""
    template, text = ANSWERS[name]
    async with served(text, template=template, commit_len=commit_len) as client:
        cut_at = (1, 9, 40, 71)[commit_len % 4]
        for fields in ({}, {"stop": ["世界?", "city", "삼"]}, {"max_tokens": cut_at}):
            expected = whole(await ask(client, tools=TOOLS, **fields))
            assert joined(await stream(client, tools=TOOLS, **fields)) == expected


async def test_the_answer_is_what_the_model_writes() -> None:
    expected = {
        "text": {"content": ANSWERS["text"][1]},
        "calls": {"content": "Let me see 世.", "calls": [("get", CITY), ("put", CITY)]},
        "thoughts": {"content": "Well:", "calls": [("get", CITY)], "reasoning": "Hm, 世界?"},
        "llama": {"content": None, "calls": [("get", CITY)]},
        "mistral": {"content": None, "calls": [("get", CITY)]},
    }
    for name, (template, text) in ANSWERS.items():
        async with served(text, template=template) as client:
            answer = await of_openai(client).chat.completions.create(
                model=MODEL, messages=ASK, tools=TOOLS
            )
        (choice,) = answer.choices
        message = choice.message
        assert message.content == expected[name]["content"]
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
        assert calls == expected[name].get("calls", [])
        assert getattr(message, "reasoning_content", None) == expected[name].get("reasoning")
        assert choice.finish_reason == ("tool_calls" if calls else "stop")
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0
        assert answer.usage.completion_tokens_details is not None
        assert answer.usage.completion_tokens_details.accepted_prediction_tokens > 0


async def test_openais_stream_helper_puts_calls_together() -> None:
    async with served(ANSWERS["calls"][1], commit_len=3) as client:
        chat = of_openai(client).chat.completions
        async with chat.stream(model=MODEL, messages=ASK, tools=TOOLS) as events:
            answer = await events.get_final_completion()
    (choice,) = answer.choices
    assert choice.message.content == "Let me see 世."
    assert [c.function.arguments for c in choice.message.tool_calls or []] == [CITY, CITY]
    assert choice.finish_reason == "tool_calls"


async def test_a_stream_has_openais_shape() -> None:
    async with served("Hello", CALL, commit_len=2) as client:
        events = await stream(client, n=2, tools=TOOLS, stream_options={"include_usage": True})
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    *chunks, last = events
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 6
    for index, reason in ((0, "stop"), (1, "tool_calls")):
        choices = [c for event in chunks for c in event["choices"] if c["index"] == index]
        assert all("finish_reason" in choice for choice in choices)
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == [reason]
        assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, reason)
    calls = [
        call
        for event in chunks
        for choice in event["choices"]
        for call in choice["delta"].get("tool_calls", [])
    ]
    assert [*calls[0]] == ["index", "id", "type", "function"]
    assert calls[0]["function"]["name"] == "get"
    assert all([*call] == ["index", "function"] for call in calls[1:])
    assert all([*call["function"]] == ["arguments"] for call in calls[1:])


async def test_length_is_what_is_left_of_the_context() -> None:
    async with served("x" * 5000, commit_len=16) as client:
        for fields in ({}, {"max_tokens": None, "max_completion_tokens": None}):
            response = await client.post("/chat/completions", json=body(**fields))
            usage = response.json()["usage"]
            assert usage["total_tokens"] == 4096
            assert response.json()["choices"][0]["finish_reason"] == "length"
        for name in ("max_tokens", "max_completion_tokens"):
            assert len((await ask(client, **{name: 7}))["message"]["content"]) == 7


async def test_an_answer_ends_before_the_stop_strings_of_its_model() -> None:
    """Unless it goes on after ends, or a grammar says where it ends."""
    stop = ("\nUser:", "###")
    async with served("Well. ### User", "Hi\nUser: more", chat_stop=stop) as client:
        for fields, contents in (
            ({}, ["Well. ", "Hi"]),
            ({"stop": ["ll"]}, ["We", "Hi"]),
            ({"guided_regex": ".*"}, ["Well. ### User", "Hi\nUser: more"]),
        ):
            response = await client.post("/chat/completions", json=body(n=2, **fields))
            choices = response.json()["choices"]
            assert [choice["message"]["content"] for choice in choices] == contents
            assert {choice["finish_reason"] for choice in choices} == {"stop"}
        response = await client.post("/completions", json={"model": MODEL, "prompt": "x"})
        assert response.json()["choices"][0]["text"].startswith("Well. ###")
    async with served(CALL, chat_stop=("name",)) as client:
        (call,) = (await ask(client, tools=TOOLS, tool_choice="required"))["message"]["tool_calls"]
        assert call["function"]["arguments"] == CITY


async def test_a_call_that_is_cut_off_has_the_length_as_its_reason() -> None:
    async with served(CALL) as client:
        choice = await ask(client, tools=TOOLS, max_tokens=60)
        assert choice["finish_reason"] == "length"
        (call,) = choice["message"]["tool_calls"]
        arguments = call["function"]["arguments"].rstrip("\N{REPLACEMENT CHARACTER}")
        assert arguments
        assert CITY.startswith(arguments)


async def test_without_tools_nothing_is_looked_for() -> None:
    async with served(CALL) as client:
        for fields in ({}, {"tools": []}, {"tools": None}, {"tools": TOOLS, "tool_choice": "none"}):
            choice = await ask(client, **fields)
            assert choice["message"] == {"role": "assistant", "content": CALL}
            assert choice["finish_reason"] == "stop"


async def test_the_model_is_not_told_of_tools_that_it_may_not_call() -> None:
    async with served("Hello") as client:
        lengths = []
        for fields in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
            response = await client.post("/chat/completions", json=body(**fields))
            lengths.append(response.json()["usage"]["prompt_tokens"])
    assert lengths[1] > lengths[0] == lengths[2]


async def test_one_call_at_a_time() -> None:
    async with served(ANSWERS["calls"][1]) as client:
        message = (await ask(client, tools=TOOLS, parallel_tool_calls=False))["message"]
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["get"]


async def test_tokens_of_thoughts_are_counted() -> None:
    thoughts, answer = "<think>\nHm 世</think>", "\nHello"
    tokenizer = chat_tokenizer(THINKING, SPECIAL)
    num_thoughts = len(tokenizer.encode(thoughts))
    options = {"stream_options": {"include_usage": True}}
    async with served(thoughts + answer, template=THINKING, commit_len=3) as client:
        for num_tokens, expected in ((num_thoughts - 2,) * 2, (99, num_thoughts)):
            fields = {"max_tokens": num_tokens}
            response = await client.post("/chat/completions", json=body(**fields))
            streamed = await stream(client, **fields, **options)
            for usage in (response.json()["usage"], streamed[-1]["usage"]):
                assert usage["completion_tokens_details"]["reasoning_tokens"] == expected
    async with served(answer) as client:
        usage = (await client.post("/chat/completions", json=body())).json()["usage"]
        assert "reasoning_tokens" not in usage["completion_tokens_details"]


async def test_an_answer_may_be_sent_back() -> None:
    """As it came, whole: with its calls, thoughts, and what each tool says."""
    async with served(ANSWERS["thoughts"][1], template=THINKING) as client:
        chat = of_openai(client).chat.completions
        answer = await chat.create(model=MODEL, messages=ASK, tools=TOOLS)
        message = answer.choices[0].message
        assert message.tool_calls
        said = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5 °C"}
        sent = [*ASK, message.model_dump(), said, {"role": "user", "content": [
            {"type": "text", "text": "And"}, {"type": "text", "text": "now?"}]}]  # fmt: skip
        again = await chat.create(model=MODEL, messages=sent, tools=TOOLS)
        assert again.usage is not None
        assert answer.usage is not None
        assert again.usage.prompt_tokens > answer.usage.prompt_tokens


async def test_a_message_may_be_continued() -> None:
    begun = [*ASK, {"role": "assistant", "content": "<think>Well, "}]
    async with served("yes</think>Hello", template=THINKING) as client:
        continued = await ask(
            client, messages=begun, add_generation_prompt=False, continue_final_message=True
        )
        assert continued["message"]["reasoning_content"] == "yes"
        assert continued["message"]["content"] == "Hello"


async def test_variables_reach_the_template() -> None:
    async with served("x</think>Hello", template=THINKING) as client:
        opened = await ask(client, chat_template_kwargs={"opens_thoughts": True})
        assert opened["message"]["reasoning_content"] == "x"
        closed = await ask(client, chat_template_kwargs={"enable_thinking": False})
        assert closed["message"]["content"] == "x</think>Hello"
    async with served("x", template="{{ reasoning_effort }}{{ messages[0].content }}") as client:
        lengths = []
        for fields in ({}, {"reasoning_effort": "high"}):
            response = await client.post("/chat/completions", json=body(**fields))
            lengths.append(response.json()["usage"]["prompt_tokens"])
        assert lengths[0] < lengths[1]


async def test_a_refusal_of_the_template_is_a_400_with_its_sentence() -> None:
    async with served("x", template=MISTRAL) as client:
        for streamed in (False, True):
            response = await client.post(
                "/chat/completions", json=body(messages=[*ASK, *ASK], stream=streamed)
            )
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert error["param"] == "messages"
            assert "Conversation roles must alternate user/assistant" in error["message"]


async def test_a_model_without_a_template_says_what_to_do() -> None:
    async with served("x", template=None) as client:
        response = await client.post("/chat/completions", json=body())
        assert response.status_code == 400
        assert "chat_template=" in response.json()["error"]["message"]
        assert (await client.post("/completions", json={"model": MODEL, "prompt": "x"})).is_success
