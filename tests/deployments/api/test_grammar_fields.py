"""Which fields ask for structured output, in several ways, and which are wrong."""

import json
import math
from typing import Any

import pytest

from deployments.api.completions import CompletionRequest
from deployments.api.validation import parse
from tests.deployments.serving import body
from tests.grammars import ARITHMETIC, PERSON, RESPONSE_FORMAT
from workers.errors import InvalidRequestError
from workers.grammar import Grammar


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
        (
            {"response_format": {**RESPONSE_FORMAT, "type": "json_object"}},
            Grammar.json_schema(PERSON),
        ),
        ({"response_format": RESPONSE_FORMAT}, Grammar.json_schema(PERSON)),
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
            {"response_format": {**RESPONSE_FORMAT, "schema": PERSON}},
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
        (
            {
                "structured_outputs": {
                    "json": PERSON,
                    "disable_any_whitespace": True,
                    "whitespace_pattern": " ",
                }
            },
            "structured_outputs.whitespace_pattern",
            "which both say what white space there may be; send one of them",
        ),
        ({"guided_json": True}, "guided_json", "is true: it must be a JSON schema"),
        ({"guided_json": "{"}, "guided_json", "is no JSON"),
        ({"guided_json": "[1]"}, "guided_json", "which is an object"),
        ({"guided_json": {"const": math.nan}}, "guided_json", "its numbers must be finite"),
        ({"guided_json": '{"maximum": 1e999}'}, "guided_json", "its numbers must be finite"),
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
