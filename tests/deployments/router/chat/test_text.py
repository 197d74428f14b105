"""Messages out of texts: what is found does not depend on the pieces in which a text comes."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from deployments.router.chat.reasoning import KNOWN_TAGS
from deployments.router.chat.text import MessageFormat, MessageText
from deployments.router.chat.tool_formats import FORMATS

HERMES, LLAMA, MISTRAL = FORMATS
HERMESES = MessageFormat(tool_calls=HERMES)
THINK, BRACKETS = KNOWN_TAGS
WEATHER = '{"city": "Zürich 世界 👩‍👩‍👧", "unit": "C"}'
NASTY = r'{"text": "a \"quoted\" } ] </tool_call> [TOOL_CALLS] \\", "deep": [{"x": [1, -2.5e3]}]}'


@dataclass(frozen=True, kw_only=True)
class Case:
    """A text, how it is read, and the message that it is."""

    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    format: MessageFormat = HERMESES


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


THINKING = MessageFormat(tool_calls=HERMES, reasoning=THINK)
OPENED = MessageFormat(tool_calls=HERMES, reasoning=THINK, is_reasoning_open=True)
LLAMAS = MessageFormat(tool_calls=LLAMA)
MISTRALS = MessageFormat(tool_calls=MISTRAL)
CASES = {
    # Hermes
    "no call": Case(text=" Hello, <b>you</b>!\n", content=" Hello, <b>you</b>!\n"),
    "one call": Case(text=hermes("get", WEATHER), calls=(("get", WEATHER),)),
    "text before and behind": Case(
        text=f"Let me see.\n\n{hermes('get', WEATHER)}\nThere.\n",
        content="Let me see.\nThere.",
        calls=(("get", WEATHER),),
    ),
    "two calls": Case(
        text=f"{hermes('a', '{}')}\n{hermes('b', NASTY)}", calls=(("a", "{}"), ("b", NASTY))
    ),
    "one call is enough": Case(
        text=f"{hermes('a', '{}')}\n{hermes('b', NASTY)} done",
        calls=(("a", "{}"),),
        content="done",
        format=MessageFormat(tool_calls=HERMES, max_tool_calls=1),
    ),
    "no arguments": Case(text='<tool_call>{"name": "a"}</tool_call>', calls=(("a", "{}"),)),
    "null arguments": Case(text=hermes("a", "null"), calls=(("a", "{}"),)),
    "arguments first": Case(
        text='<tool_call>{"arguments": {"x": 1}, "name": "a"}</tool_call>',
        calls=(("a", '{"x": 1}'),),
    ),
    "arguments as a string": Case(
        text=r'<tool_call>{"name": "a", "arguments": "{\"x\": 1}"}</tool_call>',
        calls=(("a", '{"x": 1}'),),
    ),
    "a key twice": Case(
        text='<tool_call>{"name": "a", "arguments": {}, "name": "b"}</tool_call>',
        calls=(("a", "{}"),),
    ),
    "an escaped name": Case(
        text=r'<tool_call>{"name": "\u0061b", "arguments": {}}</tool_call>', calls=(("ab", "{}"),)
    ),
    "no end tag": Case(
        text='<tool_call>{"name": "a", "arguments": {}} and so on',
        calls=(("a", "{}"),),
        content="and so on",
    ),
    "a bracket too many": Case(
        text='<tool_call>{"name": "a", "arguments": {}}}}</tool_call>', calls=(("a", "{}"),)
    ),
    "a bracket too few": Case(
        text='<tool_call>{"name": "a", "arguments": {"x": 1}</tool_call>!',
        calls=(("a", '{"x": 1}'),),
        content="!",
    ),
    "arguments without an end": Case(
        text='<tool_call>{"name": "a", "arguments": {"x": [1</tool_call>!',
        calls=(("a", '{"x": [1'),),
        content="!",
    ),
    "cut within arguments": Case(
        text='Well: <tool_call>{"name": "a", "arguments": {"x": "y',
        content="Well:",
        calls=(("a", '{"x": "y'),),
    ),
    "cut within a name": Case(
        text='Well: <tool_call>{"name": "a', content='Well: <tool_call>{"name": "a'
    ),
    "cut within a tag": Case(text="Well: <tool_", content="Well: <tool_"),
    "no JSON in the tag": Case(
        text="<tool_call>get weather</tool_call>", content="<tool_call>get weather</tool_call>"
    ),
    "no name in the tag": Case(
        text=f'<tool_call>{{"x": 1}}</tool_call>{hermes("a", "{}")}',
        content='<tool_call>{"x": 1}</tool_call>',
        calls=(("a", "{}"),),
    ),
    "a tag in a tag": Case(
        text=f"<tool_call><tool_call>{hermes('a', '{}')[11:]}",
        content="<tool_call>",
        calls=(("a", "{}"),),
    ),
    # Llama 3
    "llama": Case(text=llama("a", WEATHER), calls=(("a", WEATHER),), format=LLAMAS),
    "llama, several": Case(
        text=f"\n<|python_tag|> {llama('a', NASTY)}; {llama('b', '{}')}\n",
        calls=(("a", NASTY), ("b", "{}")),
        format=LLAMAS,
    ),
    "llama, text behind": Case(
        text=f"{llama('a', '{}')} Done. {llama('b', '{}')}",
        calls=(("a", "{}"),),
        content=f"Done. {llama('b', '{}')}",
        format=LLAMAS,
    ),
    "llama, other JSON": Case(
        text='{"name": "Ann", "age": 5, "parameters": {}}',
        content='{"name": "Ann", "age": 5, "parameters": {}}',
        format=LLAMAS,
    ),
    "llama, text": Case(text=" 5 > 4 {", content=" 5 > 4 {", format=LLAMAS),
    "llama, cut": Case(
        text='{"type": "function", "name": "a',
        format=LLAMAS,
        content='{"type": "function", "name": "a',
    ),
    # Mistral
    "mistral": Case(
        text=f'[TOOL_CALLS] [{{"name": "a", "arguments": {NASTY}}}, {{"name": "b"}}]',
        calls=(("a", NASTY), ("b", "{}")),
        format=MISTRALS,
    ),
    "mistral, newer": Case(
        text=f"So:[TOOL_CALLS]a[ARGS]{NASTY}[TOOL_CALLS]b.c[CALL_ID]x7y[ARGS]{{}}"
        " [TOOL_CALLS]d{}",
        content="So:",
        calls=(("a", NASTY), ("b.c", "{}"), ("d", "{}")),
        format=MISTRALS,
    ),
    "mistral, no call": Case(
        text="[TOOL_CALLS] none of them [TOOL_CALLS][]",
        content="[TOOL_CALLS] none of them [TOOL_CALLS][]",
        format=MISTRALS,
    ),
    "mistral, cut": Case(
        text='[TOOL_CALLS][{"name": "a", "arguments": {}}, {"na',
        calls=(("a", "{}"),),
        format=MISTRALS,
    ),
    # thoughts
    "thoughts": Case(
        text="<think>\nHm, 世界.\n\n</think>\n\nHello\n",
        reasoning="Hm, 世界.",
        content="Hello\n",
        format=THINKING,
    ),
    "thoughts that the prompt opens": Case(
        text="\nHm </thin k> <tool_call>?</think>Hello",
        reasoning="Hm </thin k> <tool_call>?",
        content="Hello",
        format=OPENED,
    ),
    "thoughts opened twice": Case(
        text="<think>Hm</think>Hello", reasoning="Hm", content="Hello", format=OPENED
    ),
    "thoughts without an end": Case(
        text=" <think>Hm, </thi", reasoning="Hm, </thi", format=THINKING
    ),
    "no thoughts": Case(
        text="I <think> so</think>.", content="I <think> so</think>.", format=THINKING
    ),
    "an empty thought and a call": Case(
        text=f"<think></think>\n{hermes('a', WEATHER)}", calls=(("a", WEATHER),), format=THINKING
    ),
    "thoughts in brackets": Case(
        text="[THINK]Hm[/THINK]Hello",
        reasoning="Hm",
        content="Hello",
        format=MessageFormat(reasoning=BRACKETS),
    ),
    "nothing is looked for": Case(
        text=f"<think>{hermes('a', '{}')}",
        content=f"<think>{hermes('a', '{}')}",
        format=MessageFormat(),
    ),
}


@dataclass(frozen=True)
class Read:
    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    ids: list[str]


def read(message_format: MessageFormat, pieces: list[str]) -> Read:
    """What a client puts together from the deltas of pieces; the last is pushed as final."""
    text = MessageText(format=message_format)
    content = reasoning = ""
    calls: list[list[str]] = []
    for index, piece in enumerate(pieces):
        delta = text.push(piece, is_final=index == len(pieces) - 1)
        content += delta.content
        reasoning += delta.reasoning
        for position, call in delta.tool_calls:
            if position == len(calls):
                assert call.name
                calls.append([call.id, call.name, ""])
            assert calls[position][0] == call.id
            calls[position][2] += call.arguments
    assert text.num_tool_calls == len(calls)
    return Read(content, reasoning, [(c[1], c[2]) for c in calls], [c[0] for c in calls])


def cuts(text: str) -> Iterator[list[str]]:
    """The text whole, in two pieces at every place, and in many of 1 to 8 characters."""
    yield [text]
    for place in range(len(text) + 1):
        yield [text[:place], text[place:]]
    for length in range(1, 9):
        yield [text[start : start + length] for start in range(0, len(text), length)]
    rng = random.Random(text)
    for _ in range(20):
        pieces, rest = [], text
        while rest:
            length = rng.randint(1, 8)
            pieces.append(rest[:length])
            rest = rest[length:]
        yield [*pieces, ""]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_message_is_the_same_for_every_cut_of_its_text(case: Case) -> None:
    for pieces in cuts(case.text):
        found = read(case.format, pieces)
        assert (found.content, found.reasoning) == (case.content, case.reasoning), pieces
        assert tuple(found.calls) == case.calls, pieces


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_nothing_that_was_said_is_taken_back(case: Case) -> None:
    """The message of each beginning is a beginning of the whole one's: no delta is negative."""
    for end in range(len(case.text)):
        text = MessageText(format=case.format)
        so_far = text.push(case.text[:end])
        assert case.content.startswith(so_far.content)
        assert case.reasoning.startswith(so_far.reasoning)
        for (name, arguments), (_, call) in zip(case.calls, so_far.tool_calls, strict=False):
            assert call.name == name
            assert arguments.startswith(call.arguments)
        assert len(so_far.tool_calls) <= len(case.calls)


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda f: f.name)
def test_random_texts_are_read_the_same_for_every_cut(tool_format: object) -> None:
    """The texts have the pieces that matter in any order: what is no call stays text."""
    rng = random.Random(7)
    tags = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>"]
    words = ['"name"', '"arguments"', '"parameters"', '"f"', "f", "1", "é", "<|python_tag|>"]
    parts = [*tags, *words, *'[]{}":,; \n\\<', '{"name": "f", "arguments": {']
    for _ in range(40):
        text = "".join(rng.choices(parts, k=rng.randint(1, 12)))
        for is_open in (False, True):
            message_format = MessageFormat(
                tool_calls=tool_format, reasoning=THINK, is_reasoning_open=is_open
            )
            whole = read(message_format, [text])
            for pieces in cuts(text):
                found = read(message_format, pieces)
                assert (found.content, found.reasoning, found.calls) == (
                    whole.content,
                    whole.reasoning,
                    whole.calls,
                ), pieces


def test_arguments_come_as_they_are_written() -> None:
    text = MessageText(format=MessageFormat(tool_calls=HERMES))
    assert not text.push('<tool_call>{"name": "f", ')
    ((_, begun),) = text.push('"arguments": {"a').tool_calls
    assert (begun.name, begun.arguments) == ("f", '{"a')
    ((_, more),) = text.push('": 1}}').tool_calls
    assert (more.id, more.name, more.arguments) == (begun.id, "", '": 1}')
    assert not text.push("</tool_call>", is_final=True)


def test_ids_are_of_the_format() -> None:
    ids = read(MISTRALS, [CASES["mistral"].text]).ids
    assert len({*ids}) == 2
    assert all(len(id_) == 9 and id_.isalnum() for id_ in ids)
    (common,) = read(LLAMAS, [llama("a", "{}")]).ids
    assert common.startswith("call_")


def test_nasty_arguments_are_json() -> None:
    assert json.loads(NASTY)["deep"] == [{"x": [1, -2500.0]}]
