"""The fields of a chat: what is taken, what is left out, and what is said of the others."""

from typing import Any

import pytest

from deployments.api import unserved
from deployments.api.chat import ChatCompletionRequest
from deployments.api.field_table import REQUIRED, rows
from deployments.api.validation import parse
from deployments.router.chat.message import Message, ToolCall
from workers.errors import InvalidRequestError

ASK = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "get", "parameters": {}, "strict": True}}
CALL = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": "{}"}}


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse(ChatCompletionRequest, {"model": "m", "messages": [ASK], **fields})


def refusal(**fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        chat(**fields)
    return caught.value


def test_messages_of_all_roles_are_taken() -> None:
    sent = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "system",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "user", "content": "Hi", "name": "Ann"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [CALL],
            "refusal": None,
            "audio": None,
        },
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
        {
            "role": "assistant",
            "content": "Well",
            "reasoning": "Hm",
            "annotations": [],
            "prefix": False,
        },
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]},
        {"role": "assistant", "content": None},
    ]
    assert chat(messages=sent).conversation().messages == (
        Message(role="developer", content="Be brief."),
        Message(role="system", content="a\nb"),
        Message(role="user", content="Hi", name="Ann"),
        Message(role="assistant", tool_calls=(ToolCall(id="c1", name="get", arguments="{}"),)),
        Message(role="tool", content="5", tool_call_id="c1"),
        Message(role="assistant", content="Well", reasoning="Hm"),
        Message(role="assistant", content="No"),
        Message(role="assistant", content=""),
    )


@pytest.mark.parametrize(
    ("message", "field", "words"),
    [
        ({"role": "owner", "content": "x"}, "role", "'owner': it must be one of system"),
        ({"role": "function", "content": "x"}, "role", "functions are tools now"),
        ({"content": "x"}, "role", "is missing"),
        ({"role": "user"}, "content", "content is missing"),
        ({"role": "user", "content": None}, "content", "content is missing"),
        ({"role": "user", "content": 5}, "content", "5: it must be a string"),
        ({"role": "user", "content": "\ud83d"}, "content", "half of a surrogate pair"),
        (
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]},
            "content",
            "part 1 has the type 'image_url'; only parts of the type 'text' are served",
        ),
        ({"role": "user", "content": ["x"]}, "content", "part 0 is 'x'"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "content", "the text 5"),
        ({"role": "tool", "content": "x"}, "tool_call_id", "which call it answers"),
        ({**ASK, "tool_call_id": "x"}, "tool_call_id", "only for messages of the role tool"),
        ({**ASK, "tool_calls": [CALL]}, "tool_calls", "only for messages of the role assistant"),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]},
            "tool_calls.0.type",
            "'custom'",
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}],
            },
            "tool_calls.0.function.arguments",
            "it must be a string",
        ),
        ({"role": "assistant", "function_call": {"name": "f"}}, "function_call", "use tool_calls"),
        (
            {"role": "assistant", "content": "Well", "prefix": True},
            "prefix",
            "prefix is true: it is not served yet; leave it out or send false, and use "
            "continue_final_message of the request in its place",
        ),
        ({"role": "assistant", "content": "Well", "partial": True}, "partial", "not served"),
        ({**ASK, "contents": "x"}, "contents", "no field 'contents'"),
    ],
    ids=str,
)
def test_a_wrong_message_is_told_by_its_place(message: Any, field: str, words: str) -> None:
    error = refusal(messages=[ASK, message])
    assert error.field == f"messages.1.{field}"
    assert words in str(error)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"messages": []}, "messages", "[]"),
        ({"messages": "Hi"}, "messages", "it must be a list"),
        ({"messages": ["Hi"]}, "messages.0", "it must be an object"),
        ({"max_tokens": 0}, "max_tokens", "an integer from 1"),
        (
            {"max_tokens": 5, "max_completion_tokens": 6},
            "max_completion_tokens",
            "they mean the same",
        ),
        ({"tools": [{"type": "custom"}]}, "tools", "tool 0 has the type 'custom'"),
        ({"tools": [{"type": "function"}]}, "tools", "tool 0 has no function with a name"),
        ({"tools": [TOOL] * 129}, "tools", "at most 128"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": False}}]},
            "tools",
            "the parameters of tool 0, 'f'",
        ),
        ({"tools": [TOOL], "tool_choice": "must"}, "tool_choice", "'must': it must be"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        (
            {"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"},
            "tool_choice",
            "tool_choice is 'required' and guided_regex is given",
        ),
        (
            {
                "tools": [TOOL],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "tool_choice",
            "leave one of them out",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "put"}}},
            "tool_choice",
            "the function 'put', but tools has none of that name",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs is not true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "an integer from 0 to 20"),
        ({"logprobs": 3}, "logprobs", "it must be true or false"),
        ({"continue_final_message": True}, "continue_final_message", "add_generation_prompt"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "it must be an object"),
        ({"chat_template": "x"}, "chat_template", "not served"),
        ({"functions": [{}]}, "functions", "not served"),
        ({"echo": True}, "echo", "not served"),
        ({"enable_thinking": False}, "enable_thinking", "not served"),
        ({"modalities": ["audio"]}, "modalities", "not served"),
        ({"temprature": 1}, "temprature", "no field 'temprature'"),
    ],
    ids=str,
)
def test_a_wrong_field_is_told(fields: dict[str, Any], field: str, words: str) -> None:
    error = refusal(**fields)
    assert error.field == field
    assert words in str(error)


def test_messages_are_counted_before_they_are_checked() -> None:
    calls = {"role": "assistant", "tool_calls": [CALL] * 4096}
    for messages in ([ASK] * 4097, [calls]):
        error = refusal(messages=messages)
        assert error.field == "messages"
        assert "it has 4097 messages and calls in them; at most 4096 are taken" in str(error)
    assert len(chat(messages=[ASK] * 4096).messages) == 4096


def test_null_means_the_default() -> None:
    names = (set(ChatCompletionRequest.model_fields) | set(unserved.CHAT)) - {"model", "messages"}
    assert chat(**dict.fromkeys(names)) == chat()


def test_tools_go_to_the_template_as_they_are_sent() -> None:
    assert chat(tools=[TOOL]).conversation().tools == (TOOL,)
    assert chat(tools=[TOOL], tool_choice="none").conversation().tools == ()


def test_a_choice_of_tools_is_what_the_answer_has_to_be() -> None:
    named = {"type": "function", "function": {"name": "get"}}
    text = {"type": "text"}
    for choice, must_call, name in (
        ("auto", False, None),
        ("required", True, None),
        (named, True, "get"),
    ):
        sent = chat(tools=[TOOL], tool_choice=choice, response_format=text).conversation()
        assert (sent.must_call, sent.named_function) == (must_call, name)
        assert sent.has_one_call == (name is not None)
    assert chat(tools=[TOOL], parallel_tool_calls=False).conversation().has_one_call


def test_fields_of_openais_are_variables_where_they_are_sent() -> None:
    assert chat().conversation().template_kwargs == {}
    sent = chat(reasoning_effort="low", parallel_tool_calls=False, chat_template_kwargs={"x": [1]})
    assert sent.conversation().template_kwargs == {
        "reasoning_effort": "low", "parallel_tool_calls": False, "x": [1]
    }  # fmt: skip


def test_the_table_has_every_field_in_words() -> None:
    table = {row.name: row for row in rows(ChatCompletionRequest)}
    assert [name for name, row in table.items() if row.default == REQUIRED] == ["messages"]
    assert all(row.meaning and row.takes for row in table.values())
    assert table["max_tokens"].default == ""
