"""Conversations as prompts: the tokens of transformers, and what a template may not do."""

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from deployments.router.chat.message import Conversation, Message, ToolCall
from deployments.router.chat.reader import ConversationReader
from deployments.router.chat.template import ChatTemplate, load_chat_template
from deployments.router.chat.time_limit import run_within
from deployments.router.prompts import PromptReader
from tests.deployments.router.chat.templates import HERMES, LLAMA, MISTRAL, THINKING
from tests.deployments.scripted import chat_tokenizer
from tests.fakes import END
from workers.errors import ConfigError, ContextLengthError, InvalidRequestError

SPECIAL = ("<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "[INST]", "[/INST]")
TOOL = {
    "type": "function",
    "function": {"name": "get", "description": "Wetter", "parameters": {"type": "object"}},
}
CALL = ToolCall(id="call00001", name="get", arguments='{"city": "世界"}')
CHAT = (
    Message(role="system", content="Be brief."),
    Message(role="user", content=" What about 世界 👩‍👩‍👧?\n"),
    Message(role="assistant", tool_calls=(CALL,)),
    Message(role="tool", content="5 °C", tool_call_id="call00001"),
    Message(role="assistant", content="Cold.", reasoning="5 is cold"),
    Message(role="user", content="Thanks"),
)
SHORT = (Message(role="user", content="Hi"), Message(role="assistant", content="Hello there "))


def as_transformers_has(messages: tuple[Message, ...]) -> list[dict[str, Any]]:
    """The messages by hand, as the documentation of transformers shows them."""
    shown = []
    for message in messages:
        values: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            (call,) = message.tool_calls
            function = {"name": call.name, "arguments": json.loads(call.arguments)}
            values["tool_calls"] = [{"id": call.id, "type": "function", "function": function}]
        if message.tool_call_id:
            values["tool_call_id"] = message.tool_call_id
        if message.reasoning:
            values["reasoning_content"] = message.reasoning
        shown.append(values)
    return shown


def reader_of(
    tokenizer: Any, *, max_model_len: int = 4096, timeout_s: float = 10.0, **options: Any
) -> ConversationReader:
    return ConversationReader(
        ChatTemplate(tokenizer, **options),
        PromptReader(tokenizer, max_model_len=max_model_len),
        timeout_s=timeout_s,
    )


async def refusal(
    reader: ConversationReader, *messages: Message, **more: Any
) -> InvalidRequestError:
    messages = messages or (Message(role="user", content="Hi"),)
    with pytest.raises(InvalidRequestError) as caught:
        await reader.read([Conversation(messages=messages, **more)])
    return caught.value


@pytest.mark.parametrize("source", [HERMES, THINKING, LLAMA], ids=["hermes", "thinking", "llama"])
@pytest.mark.parametrize(
    ("messages", "options"),
    [
        (CHAT, {}),
        (CHAT, {"add_generation_prompt": False}),
        (SHORT, {"add_generation_prompt": False, "continue_final_message": True}),
    ],
    ids=["answer", "no opening", "continued"],
)
async def test_tokens_are_those_of_transformers(
    source: str, messages: tuple[Message, ...], options: dict[str, Any]
) -> None:
    tokenizer = chat_tokenizer(source, SPECIAL)
    if source is LLAMA:
        messages = tuple(m for m in messages if m.content is not None)
    for variables in ({}, {"enable_thinking": False}):
        conversation = Conversation(
            messages=messages, tools=(TOOL,), template_kwargs=variables, **options
        )
        (ids,) = await reader_of(tokenizer).read([conversation])
        expected = tokenizer.apply_chat_template(
            as_transformers_has(messages),
            tools=[TOOL],
            tokenize=True,
            return_dict=False,
            **{"add_generation_prompt": True, **options, **variables},
        )
        assert list(ids) == expected


async def test_a_text_begins_once() -> None:
    """The template writes the token that begins a text; the tokenizer adds no second."""
    tokenizer = chat_tokenizer(LLAMA)
    tokenizer._tokenizer.post_processor = _begins_texts(tokenizer)
    bos = tokenizer.bos_token_id
    assert tokenizer.encode("x")[0] == bos
    (ids,) = await reader_of(tokenizer).read([Conversation(messages=SHORT[:1])])
    assert ids[0] == bos
    assert bos not in ids[1:]


def _begins_texts(tokenizer: Any) -> Any:
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(single=f"{END} $A", special_tokens=[(END, tokenizer.bos_token_id)])


async def test_a_refusal_has_the_templates_own_sentence() -> None:
    error = await refusal(reader_of(chat_tokenizer(MISTRAL)), *CHAT[1:2], *CHAT[1:2])
    assert error.field == "messages"
    assert "Conversation roles must alternate user/assistant" in str(error)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ messages[3].content }}", "refuses the messages"),
        ("{{ messages | tojson | int / 0 }}", "cannot be applied to the messages"),
        ("{{ messages.append(1) }}", "refuses the messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses the messages"),
        ("{% for x in %}", "refuses the messages"),
        ("{{ '%s' % 5 + 1 }}", "cannot be applied"),
    ],
)
async def test_whatever_a_template_raises_is_told(source: str, words: str) -> None:
    error = await refusal(reader_of(chat_tokenizer(source)))
    assert error.field == "messages"
    assert words in str(error)


async def test_what_cannot_be_continued_is_told_in_a_sentence() -> None:
    calling = Message(role="assistant", tool_calls=(ToolCall(id="a", name="f", arguments="{}"),))
    reader = reader_of(chat_tokenizer(LLAMA))
    asked = Conversation(messages=(*SHORT[:1], calling), continue_final_message=True,
                         add_generation_prompt=False)  # fmt: skip
    with pytest.raises(InvalidRequestError, match="messages: continue_final_message is set but"):
        await reader.read([asked])


async def test_what_is_nested_too_deeply_is_told() -> None:
    nested: dict[str, Any] = {}
    for _ in range(3000):
        nested = {"a": nested}
    reader = reader_of(chat_tokenizer("{{ deep | tojson }}"))
    with pytest.raises(InvalidRequestError, match="nested too deeply for the model's"):
        await reader.read([Conversation(messages=SHORT, template_kwargs={"deep": nested})])


async def test_a_template_that_loops_is_ended_and_holds_up_nobody() -> None:
    source = (
        "{% if messages[0].content == 'loop' %}"
        "{% for a in range(99999) %}{% for b in range(99999) %}"
        "{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}{% endif %}fine"
    )
    reader = reader_of(chat_tokenizer(source), timeout_s=0.2)
    looping = Message(role="user", content="loop")
    errors = await asyncio.gather(*[refusal(reader, looping) for _ in range(5)])
    assert all("still at work" in str(error) for error in errors)
    (ids,) = await reader.read([Conversation(messages=SHORT)])
    assert ids
    async with asyncio.timeout(30):
        while any(thread.name == "chat-template" for thread in threading.enumerate()):
            await asyncio.sleep(0.01)


async def test_whoever_leaves_ends_the_template() -> None:
    has_begun = threading.Event()
    has_ended = threading.Event()

    def loop() -> None:
        has_begun.set()
        try:
            while True:
                time.sleep(0)
        finally:
            has_ended.set()

    task = asyncio.create_task(run_within(60.0, loop))
    await asyncio.to_thread(has_begun.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(has_ended.wait, 30)


async def test_long_conversations_are_refused_before_they_are_tokenized() -> None:
    reader = reader_of(chat_tokenizer(HERMES, SPECIAL), max_model_len=8)
    with pytest.raises(ContextLengthError) as caught:
        await reader.read([Conversation(messages=(Message(role="user", content="x" * 1000),))])
    assert caught.value.field == "messages"
    looping = "{% for i in range(90000) %}{{ messages[0].content }}{% endfor %}"
    with pytest.raises(ContextLengthError):
        await reader_of(chat_tokenizer(looping)).read([Conversation(messages=SHORT)])


async def test_half_a_character_is_refused_wherever_it_stands() -> None:
    reader = reader_of(chat_tokenizer(HERMES, SPECIAL))
    tool = {"type": "function", "function": {"name": "a", "description": "\ud83d"}}
    assert "surrogate" in str(await refusal(reader, tools=(tool,)))


async def test_without_a_template_it_is_said_what_to_do() -> None:
    tokenizer = chat_tokenizer(None)
    assert await load_chat_template(tokenizer, path=None) is None
    reader = ConversationReader(None, PromptReader(tokenizer, max_model_len=100))
    error = await refusal(reader)
    assert "chat_template=" in str(error)
    assert error.field == "messages"
    assert await reader.read(["text", (1, 2)]) == ["text", (1, 2)]


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "chat_template", "tokenize", "add_generation_prompt", "truncation"],
)
async def test_a_client_cannot_set_what_is_no_variable(name: str) -> None:
    error = await refusal(
        reader_of(chat_tokenizer(HERMES, SPECIAL)), template_kwargs={name: "{{ 1 }}"}
    )
    assert error.field == "chat_template_kwargs"
    assert repr(name) in str(error)


async def test_tools_need_a_place_in_the_template() -> None:
    error = await refusal(reader_of(chat_tokenizer("{{ messages[0].content }}")), tools=(TOOL,))
    assert error.field == "tools"


async def test_developers_are_the_system_where_a_template_knows_none() -> None:
    conversation = Conversation(messages=(Message(role="developer", content="x"),))
    for source, role in (("{{ messages[0].role }}", "system"),
                         ("{{ messages[0].role }}{# developer #}", "developer")):  # fmt: skip
        tokenizer = chat_tokenizer(source)
        assert ChatTemplate(tokenizer).render(conversation) == role


async def test_arguments_that_are_no_object_stay_text() -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments }}"
    for arguments, shown in (('{"a": 1}', "{'a': 1}"), ('{"a', '{"a'), ("[1]", "[1]"), ("", "{}")):
        call = ToolCall(id="1", name="f", arguments=arguments)
        conversation = Conversation(messages=(Message(role="assistant", tool_calls=(call,)),))
        assert ChatTemplate(chat_tokenizer(source)).render(conversation) == shown


@pytest.mark.parametrize(
    ("source", "tool_calls", "reasoning"),
    [
        (HERMES, "hermes", None),
        (THINKING, "hermes", "<think>"),
        (LLAMA, "llama3_json", None),
        (MISTRAL, "mistral", None),
        ("<tool_call><function=name>", None, None),
        ("{{ messages }}", None, None),
        ("{{ messages[0].content.split('</think>')[-1] }}", None, "<think>"),
        ("[THINK] [/THINK]", None, "[THINK]"),
    ],
)
def test_formats_are_found_in_the_template(
    source: str, tool_calls: str | None, reasoning: str | None
) -> None:
    template = ChatTemplate(chat_tokenizer(source))
    assert (template.tool_calls and template.tool_calls.name) == tool_calls
    assert (template.reasoning and template.reasoning.opening) == reasoning


def test_formats_may_be_chosen() -> None:
    tokenizer = chat_tokenizer(THINKING)
    off = ChatTemplate(tokenizer, tool_call_parser="none", reasoning_parser="none")
    assert (off.tool_calls, off.reasoning) == (None, None)
    chosen = ChatTemplate(chat_tokenizer("x"), tool_call_parser="mistral", reasoning_parser="think")
    assert chosen.tool_calls is not None
    assert chosen.tool_calls.name == "mistral"
    assert chosen.reasoning is not None


@pytest.mark.parametrize(
    ("messages", "options", "is_open"),
    [
        (CHAT, {}, False),
        (CHAT, {"template_kwargs": {"opens_thoughts": True}}, True),
        (CHAT, {"template_kwargs": {"enable_thinking": False}}, False),
        ((Message(role="user", content="What is <think>"),), {}, False),
        (
            (*SHORT[:1], Message(role="assistant", content="<think> Well")),
            {"continue_final_message": True, "add_generation_prompt": False},
            True,
        ),
    ],
    ids=["closed", "opened by the template", "off", "a user's words", "continued"],
)
async def test_it_is_seen_whether_the_prompt_opens_the_thoughts(
    messages: tuple[Message, ...], options: dict[str, Any], is_open: bool
) -> None:
    template = ChatTemplate(chat_tokenizer(THINKING, SPECIAL))
    conversation = Conversation(messages=messages, **options)
    found = template.message_format(conversation, template.render(conversation))
    assert found.is_reasoning_open == is_open
    assert found.tool_calls is None  # there are no tools


def test_tags_that_are_special_tokens_stay_in_the_text() -> None:
    template = ChatTemplate(chat_tokenizer(MISTRAL, SPECIAL))
    assert template.needs_special_tokens(Conversation(messages=SHORT, tools=(TOOL,)))
    assert not template.needs_special_tokens(Conversation(messages=SHORT))
    hermes = ChatTemplate(chat_tokenizer(HERMES, SPECIAL))
    assert not hermes.needs_special_tokens(Conversation(messages=SHORT, tools=(TOOL,)))


async def test_a_file_comes_in_place_of_the_tokenizers_own(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages[0].content }}!")
    for own in (None, HERMES):
        template = await load_chat_template(chat_tokenizer(own), path=str(path))
        assert template is not None
        assert template.render(Conversation(messages=SHORT)) == "Hi!"
    path.write_text("{{ messages[0].content }!")
    with pytest.raises(ConfigError, match=r"chat_template is .*, which is no template in Jinja"):
        await load_chat_template(chat_tokenizer(None), path=str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        await load_chat_template(chat_tokenizer(None), path=str(tmp_path / "none"))
    path.write_text("{{ raise_exception('a system message comes first') }}")
    assert await load_chat_template(chat_tokenizer(None), path=str(path)) is not None
