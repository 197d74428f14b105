"""Grammars and conversations for requests: sensible ones, odd ones, and some that are wrong."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "kind": {"enum": ["first", "second"]}},
    "required": ["a", "kind"],
    "additionalProperties": False,
}
SCHEMAS: Sequence[Any] = (
    SCHEMA,
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1},
    {"type": "string", "pattern": "^[ab]+$"},
    {"enum": ["é世", None, 1.5]},
    {},
    {"type": "integer", "multipleOf": 2_147_483_648},
    {"type": "nothing"},
    {"$ref": "#/$defs/nowhere"},
)
REGEXES = ("[a-c]{4}", "(ab|c)*d?", "[^a]+", "\\d{2}-\\d{2}", "(?s:.*)", "é|世", "(", "(?=a)b")
CHOICES = (["left", "right"], ["a"], ["a", "ab", "abc"], ["é世\n", '"'], [""])
RULES = (
    'start: "a"+ | expr\nexpr: "(" expr ")" | /[0-9]/',
    'root ::= "yes" | "no" [!?]*',
    "start: start start | start",
    "start: nowhere",
    "root ::= (",
    "0",
)
THOUGHTS = ("<think>", "</think>", "<tool_call>", '{"name": "f", "arguments": {}}', "[TOOL_CALLS]")
CONTENTS = ("def f(x):", "", " ", "é世\U0001f469", "{{ messages }}", "a\n\nb", *THOUGHTS)


def draw_grammar(rng: random.Random) -> dict[str, Any]:
    """A field that asks for a grammar, in one of the ways there are."""
    schema = rng.choice(SCHEMAS)
    kinds: dict[str, Any] = {
        "json": rng.choice([schema, json.dumps(schema)]),
        "regex": rng.choice(REGEXES),
        "choice": rng.choice(CHOICES),
        "grammar": rng.choice(RULES),
    }
    kind = rng.choice([*kinds])
    ways: Sequence[Callable[[], dict[str, Any]]] = (
        lambda: {f"guided_{kind}": kinds[kind]},
        lambda: {"structured_outputs": {kind: kinds[kind]}},
        lambda: {"response_format": {"type": "json_object"}},
        lambda: {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": schema},
            }
        },
    )
    (way,) = rng.choices(ways, weights=(6, 3, 1, 1))
    return way()


def draw_conversation(rng: random.Random) -> dict[str, Any]:
    """Messages, and the fields that only chats have."""
    fields: dict[str, Any] = {"messages": _draw_messages(rng)}
    rare: dict[str, Callable[[], Any]] = {
        "tools": lambda: [_draw_tool(rng, name) for name in ("f", "get-x")[: rng.randint(0, 2)]],
        "tool_choice": lambda: rng.choice(["auto", "none"]),
        "parallel_tool_calls": lambda: rng.random() < 0.5,
        "chat_template_kwargs": lambda: rng.choice(
            [{}, {"enable_thinking": False}, {"x": [1e308, None, {"é": -1}]}, {"tokenize": True}]
        ),
        "reasoning_effort": lambda: rng.choice(["low", "é"]),
    }
    for name, draw in rare.items():
        if rng.random() < 0.3:
            fields[name] = draw()
    if rng.random() < 0.2:
        fields |= {"add_generation_prompt": False, "continue_final_message": rng.random() < 0.5}
    return fields


def _draw_messages(rng: random.Random) -> list[dict[str, Any]]:
    messages = [_draw_message(rng) for _ in range(rng.choice([0, 0, 1, 2]))]
    return [*messages, {"role": "user", "content": rng.choice(CONTENTS)}]


def _draw_message(rng: random.Random) -> dict[str, Any]:
    content = rng.choice(CONTENTS)
    arguments = rng.choice(["{}", '{"a": [1, "é"]}', "", "{", "[]"])
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return rng.choice(
        [
            {"role": "system", "content": content},
            {"role": "developer", "content": content},
            {"role": "user", "content": content, "name": "é"},
            {"role": "assistant", "content": content, "reasoning_content": "Hm."},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": content, "tool_call_id": "c1"},
        ]
    )


def _draw_tool(rng: random.Random, name: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "description": rng.choice(CONTENTS)}
    if rng.random() < 0.5:
        function["parameters"] = dict(SCHEMA)
    return {"type": "function", "function": function}
