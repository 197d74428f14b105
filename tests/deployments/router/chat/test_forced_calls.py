"""Calls that are forced: what the grammar of each format lets through is read as such calls."""

import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from deployments.router.chat.message import Conversation, Message
from deployments.router.chat.template import ChatTemplate
from deployments.router.chat.text import MessageText
from tests.deployments.router.chat.templates import HERMES, LLAMA, MISTRAL
from tests.deployments.scripted import chat_tokenizer
from tests.workers.test_grammar import allowed_tokens
from workers.errors import InvalidRequestError
from workers.grammar import Grammar
from workers.grammar_compiler import GrammarCompiler

NEWER_MISTRAL = MISTRAL.replace("(message.tool_calls | tojson)", "'name[ARGS]{}'")
SPACED_MISTRAL = MISTRAL.replace("'[TOOL_CALLS]' +", "'[TOOL_CALLS] [' +")
UNKNOWN = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson }}"
TEMPLATES = {
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "spaced mistral": SPACED_MISTRAL,
    "newer mistral": NEWER_MISTRAL,
    "unknown": UNKNOWN,
}
SPECIAL = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]")
GET = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F}] </tool_call [TOOL", '\\"K"']},
        "place": {"$ref": "#/$defs/place"},
        "days": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
    },
    "required": ["place", "unit"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Zürich ::= 世界"]}},
            "required": ["city"],
            "additionalProperties": False,
            "description": "a ::= b",
        }
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get": GET, "put-it_2": GET, "stop": NOTHING}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "Gets.", "parameters": schema}}
    for name, schema in {**SCHEMAS, "stop": None}.items()
)


def conversation(tools: Sequence[Any] = TOOLS, **fields: Any) -> Conversation:
    message = Message(role="user", content="Hi")
    return Conversation(messages=(message,), tools=tuple(tools), must_call=True, **fields)


class Writer:
    """Writes what a conversation's grammar allows, and reads it."""

    def __init__(
        self,
        template: str,
        asked: Conversation,
        *,
        special: Sequence[str] = (),
        parser: str = "auto",
    ) -> None:
        self._tokenizer = chat_tokenizer(template, special)
        self._end = self._tokenizer.eos_token_id
        self._solid = {
            token
            for token in range(len(self._tokenizer))
            if self._tokenizer.decode([token]).strip()
        }
        """The tokens that are more than white space."""
        self._asked = asked
        self._template = ChatTemplate(self._tokenizer, tool_call_parser=parser)
        self._grammar = Grammar.tool_calls(self._template.forced_calls(asked))
        self._compiler = GrammarCompiler(
            lambda: self._tokenizer,
            vocab_size=len(self._tokenizer),
            end_tokens=(self._end,),
        )

    def write(self, seed: int) -> str:
        """A random text that the grammar allows, from its first token to its end."""
        rng = random.Random(seed)
        matcher, output = self._compiler.matcher(self._grammar), list[int]()
        while not output or output[-1] != self._end:
            assert matcher.move_to(output)
            tokens = allowed_tokens(matcher)
            others = sorted(tokens - {self._end})
            solid = [token for token in others if token in self._solid]
            ends = self._end in tokens and (rng.random() < 0.6 or not others)
            output.append(self._end if ends else rng.choice(solid or others))
            assert len(output) < 2000
        return str(self._tokenizer.decode(output[:-1], skip_special_tokens=False))

    def read(self, text: str, *, piece_len: int) -> tuple[str, list[dict[str, str]]]:
        """The content and the calls of a text that comes in pieces."""
        message = MessageText(format=self._template.message_format(self._asked, ""))
        content, calls = "", list[dict[str, str]]()
        pieces = [text[i : i + piece_len] for i in range(0, len(text), piece_len)]
        for index, piece in enumerate(pieces):
            delta = message.push(piece, is_final=index == len(pieces) - 1)
            content += delta.content
            for number, call in delta.tool_calls:
                if number == len(calls):
                    calls.append({"name": call.name, "arguments": ""})
                calls[number]["arguments"] += call.arguments
        return content, calls


@pytest.mark.parametrize("special", [(), SPECIAL], ids=["texts", "tokens"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_what_may_be_written_is_read_as_calls(template: str, special: Sequence[str]) -> None:
    """The calls are of any of the functions, one or more, each with arguments that are valid."""
    writer = Writer(TEMPLATES[template], conversation(), special=special)
    nums, names = set(), set()
    for seed in range(8):
        text = writer.write(seed)
        content, calls = writer.read(text, piece_len=1 + seed % 9)
        assert content == ""
        for call in calls:
            jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
        nums.add(len(calls))
        names |= {call["name"] for call in calls}
    assert 0 not in nums
    assert len(nums) > 1
    assert names == {*SCHEMAS}


@pytest.mark.parametrize("template", TEMPLATES)
def test_one_call_is_exactly_one(template: str) -> None:
    for fields in ({"parallel_tool_calls": False}, {"named_function": "get"}):
        writer = Writer(TEMPLATES[template], conversation(**fields))
        names = set()
        for seed in range(6):
            content, (call,) = writer.read(writer.write(seed), piece_len=3)
            jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
            assert content == ""
            names.add(call["name"])
        assert (names == {"get"}) == ("named_function" in fields)


def test_arguments_are_spaced_as_templates_do() -> None:
    """So a model cannot write spaces without end."""
    writer = Writer(UNKNOWN, conversation(named_function="get"))
    for seed in range(8):
        text = writer.write(seed)
        assert text == json.dumps(json.loads(text), ensure_ascii=False)


EXPECTED = {
    "hermes": (
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
        "\n",
    ),
    "llama": ('{"name": "stop", "parameters": {}}', "; "),
    "newer mistral": ("[TOOL_CALLS]stop[ARGS]{}", ""),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_call_looks_as_models_were_taught(name: str) -> None:
    call, between = EXPECTED[name]
    writer = Writer(TEMPLATES[name], conversation(TOOLS[2:]))
    texts = {writer.write(seed) for seed in range(8)}
    assert {call, call + between + call} <= texts


def test_lists_of_calls_look_as_models_were_taught() -> None:
    for template, before in (("mistral", "[TOOL_CALLS]"), ("spaced mistral", "[TOOL_CALLS] ")):
        writer = Writer(TEMPLATES[template], conversation(TOOLS[2:]))
        texts = {writer.write(seed) for seed in range(8)}
        assert f'{before}[{{"name": "stop", "arguments": {{}}}}]' in texts


def test_where_the_format_is_unknown_the_arguments_are_the_call() -> None:
    for template, parser in ((UNKNOWN, "auto"), (HERMES, "none")):
        asked = conversation(named_function="get")
        writer = Writer(template, asked, parser=parser)
        text = writer.write(1)
        jsonschema.validate(json.loads(text), GET)
        assert writer.read(text, piece_len=2) == ("", [{"name": "get", "arguments": text}])


def test_a_name_that_a_format_has_no_place_for_is_written_as_json() -> None:
    tool = {"type": "function", "function": {"name": 'say "hi"'}}
    for template in TEMPLATES.values():
        writer = Writer(template, conversation([tool]))
        _, calls = writer.read(writer.write(0), piece_len=1)
        assert {call["name"] for call in calls} == {'say "hi"'}


def test_a_schema_that_cannot_be_followed_is_said_to_be_of_its_function() -> None:
    schema = {"properties": {"at": {"type": "string", "format": "moon"}}}
    tool = {"type": "function", "function": {"name": "land", "parameters": schema}}
    with pytest.raises(InvalidRequestError, match=r"the parameters of 'land': .*moon"):
        Writer(HERMES, conversation([*TOOLS, tool])).write(0)
