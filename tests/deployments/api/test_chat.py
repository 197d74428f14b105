"""Chat completions over HTTP, by OpenAI's own client and as they stand on the wire."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from cluster import bundled
from deployments.api.http import HttpOptions, make_app
from deployments.router.chat.template import load_chat_template
from deployments.router.tokenizer import load_tokenizer
from tests.deployments.router.chat.templates import HERMES, LLAMA, MISTRAL, THINKING
from tests.deployments.scripted import MODEL, chat_tokenizer, scripted_service
from tests.deployments.serving import client_of, local_serving
from workers.end_tokens import find_stop_strings
from workers.model import Model, load_model

SPECIAL = ("<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "[INST]", "[/INST]")
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("get", "put")]
ASK = [{"role": "user", "content": "Hi"}]
CITY = '{"city": "Zürich 世界 👩‍👩‍👧"}'
CALL = f'<tool_call>\n{{"name": "get", "arguments": {CITY}}}\n</tool_call>'
ANSWERS = {
    "text": (HERMES, "Grüße, 世界! 👩‍👩‍👧 ď 🇨🇿\n삼겹살 "),
    "calls": (HERMES, f"Let me see 世.\n{CALL}\n{CALL.replace('get', 'put')}"),
    "thoughts": (THINKING, f"<think>\nHm, 世界?\n</think>\n\nWell:{CALL}"),
    "llama": (LLAMA, f'{{"name": "get", "parameters": {CITY}}}'),
    "mistral": (MISTRAL, f'[TOOL_CALLS] [{{"name": "get", "arguments": {CITY}}}]'),
}


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


def of_openai(client: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key="unused", base_url="http://test/v1", http_client=client, max_retries=0
    )


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


def joined(events: Sequence[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """What the deltas of a choice make together, as a client does."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reasons = []
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                message[key] += delta.get(key, "")
            for call in delta.get("tool_calls", []):
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append(call["function"])
                else:
                    arguments = call["function"]["arguments"]
                    message["tool_calls"][call["index"]]["arguments"] += arguments
            if choice["finish_reason"] is not None:
                reasons.append(choice["finish_reason"])
    (message["finish_reason"],) = reasons
    return message


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
    """Whatever the tokens of a commit, with stop strings and without, and cut at any length."""
    template, text = ANSWERS[name]
    async with served(text, template=template, commit_len=commit_len) as client:
        options = [
            {},
            {"stop": ["世界?", "city", "삼"]},
            *({"max_tokens": n} for n in (1, 9, 40, 71)),
        ]
        for fields in options:
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
    async with served("x" * 5000) as client:
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
