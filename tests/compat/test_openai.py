"""The `openai` package, synchronous and asynchronous, as its users call it."""

import asyncio
import json

import openai
import pytest

from tests.compat.conftest import MODEL, Server

PROMPT = "def read(path):\n    "
MESSAGES = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": "Read a file."},
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [1, 2, 3]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key="unused", max_retries=0)


def expected_text(server: Server, prompt_ids: list[int], num_tokens: int) -> str:
    return server.tokenizer.decode(server.greedy(prompt_ids, num_tokens), skip_special_tokens=True)


def chat_prompt(server: Server) -> list[int]:
    ids = server.tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return list(ids)


def test_a_completion_is_the_targets_own(server: Server, client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].text == expected_text(server, server.tokenizer.encode(PROMPT), 24)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24


def test_a_streamed_completion_is_the_same(server: Server, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=24,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    text = "".join(event.choices[0].text for event in stream)
    assert text == expected_text(server, server.tokenizer.encode(PROMPT), 24)


def test_log_probabilities_of_a_completion(server: Server, client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=8,
        temperature=0,
        logprobs=3,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    context = server.tokenizer.encode(PROMPT)
    expected = server.log_likelihood(context, server.greedy(context, 8))
    assert sum(logprobs.token_logprobs) == pytest.approx(expected, abs=1e-3)
    assert logprobs.top_logprobs is not None
    assert all(len(top) >= 3 for top in logprobs.top_logprobs)
    assert "".join(logprobs.tokens or []) == answer.choices[0].text


def test_a_chat_answer_is_the_targets_own(server: Server, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,  # type: ignore[arg-type]
        max_completion_tokens=24,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    message = answer.choices[0].message
    assert message.role == "assistant"
    assert message.content == expected_text(server, chat_prompt(server), 24)


def test_a_streamed_chat_answer_is_the_same(server: Server, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,  # type: ignore[arg-type]
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    events = list(stream)
    deltas = [choice.delta for event in events for choice in event.choices]
    assert deltas[0].role == "assistant"
    text = "".join(delta.content or "" for delta in deltas)
    assert text == expected_text(server, chat_prompt(server), 24)
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 24


def test_log_probabilities_of_a_chat_answer(server: Server, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,  # type: ignore[arg-type]
        max_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_body={"ignore_eos": True},
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    context = chat_prompt(server)
    expected = server.log_likelihood(context, server.greedy(context, 6))
    assert sum(token.logprob for token in logprobs.content) == pytest.approx(expected, abs=1e-3)
    assert all(len(token.top_logprobs) == 2 for token in logprobs.content)


def test_structured_output_keeps_to_its_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,  # type: ignore[arg-type]
        max_tokens=400,
        temperature=1,
        seed=1,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
        },
    )
    assert answer.choices[0].finish_reason == "stop"
    person = json.loads(answer.choices[0].message.content or "")
    assert set(person) == {"name", "age"}
    assert person["age"] in (1, 2, 3)


def test_tools_are_taken_and_calls_forced(server: Server, client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "store", "parameters": SCHEMA}}]
    options = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "temperature": 0}
    answer = client.chat.completions.create(**options, tools=tools)  # type: ignore[call-overload]
    expected = server.tokenizer.apply_chat_template(
        MESSAGES, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert answer.usage.prompt_tokens == len(expected)
    named = {"type": "function", "function": {"name": "store"}}
    options.update(max_tokens=200, parallel_tool_calls=False)
    for choice, reason in (("required", "tool_calls"), (named, "stop")):
        answer = client.chat.completions.create(  # type: ignore[call-overload]
            **options, tools=tools, tool_choice=choice
        )
        assert answer.choices[0].finish_reason == reason
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "store"
        assert json.loads(call.function.arguments)["age"] in (1, 2, 3)
    other = {"type": "function", "function": {"name": "load"}}
    with pytest.raises(openai.BadRequestError, match="the function 'load'"):
        client.chat.completions.create(  # type: ignore[call-overload]
            **options, tools=tools, tool_choice=other
        )


def test_many_calls_of_the_asynchronous_client(server: Server) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=server.base_url, api_key="unused", max_retries=0
        ) as client:
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model=MODEL,
                        messages=MESSAGES,  # type: ignore[arg-type]
                        max_tokens=12,
                        temperature=0,
                        extra_body={"ignore_eos": True},
                    )
                    for _ in range(6)
                )
            )
        return [answer.choices[0].message.content or "" for answer in answers]

    assert set(asyncio.run(run())) == {expected_text(server, chat_prompt(server), 12)}


def test_a_refusal_is_the_packages_own_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=MODEL, prompt=PROMPT, temperature=9.0)
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.chat.completions.create(
            model="gpt-4",
            messages=MESSAGES,  # type: ignore[arg-type]
        )


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]
