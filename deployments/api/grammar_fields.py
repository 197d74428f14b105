"""The fields that ask for structured output, in OpenAI's words and in vLLM's.

They say the same thing in several ways, so a request may use one of them. What comes of it is a
`Grammar`, which knows no wire format.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Self

from pydantic import Field, SkipValidation, StringConstraints, model_validator

from deployments.api.marks import Grpc, Takes
from deployments.api.validation import RequestModel, brief, check_text, field_error
from workers.grammar import Grammar
from workers.grammar_library import MAX_SOURCE_LEN

MAX_CHOICES = 1024
FORMATS = ("text", "json_object", "json_schema")
"""The types of `response_format` that are served."""
SOURCE_WORDS = f"a string of at most {MAX_SOURCE_LEN} characters"

Source = Annotated[str, StringConstraints(min_length=1, max_length=MAX_SOURCE_LEN)]
Choice = Annotated[str, StringConstraints(max_length=MAX_SOURCE_LEN)]


class GrammarFields(RequestModel):
    """What a completion has to match, in the fields of all wire formats; one of them at most."""

    guided_json: Annotated[
        SkipValidation[str | dict[str, Any] | None],
        Field(description="The completion is JSON that is valid by this JSON schema."),
        Takes("a JSON schema, as an object or as a string"),
        Grpc(40),
    ] = None
    guided_regex: Annotated[
        Source | None,
        Field(description="The regular expression matches the whole completion."),
        Takes(SOURCE_WORDS),
        Grpc(41),
    ] = None
    guided_choice: Annotated[
        list[Choice],
        Field(
            max_length=MAX_CHOICES,
            description="The completion is one of these texts.",
            default_factory=list,
        ),
        Takes(f"a list of at most {MAX_CHOICES} strings"),
        Grpc(42),
    ]
    guided_grammar: Annotated[
        Source | None,
        Field(
            description="The context-free grammar derives the completion from its rule `start`, "
            "in Lark's syntax, or from `root`, in the EBNF of llama.cpp."
        ),
        Takes(SOURCE_WORDS),
        Grpc(43),
    ] = None

    @property
    def grammar(self) -> Grammar | None:
        """What the completions have to match; the property is named as in SamplingParams."""
        return next((asked.grammar for asked in self._asked()), None)

    @property
    def grammar_field(self) -> str | None:
        """The field that asks for the grammar, in the client's spelling."""
        return next((asked.field for asked in self._asked()), None)

    @model_validator(mode="after")
    def _check_grammar(self) -> Self:
        asked = list(self._asked())
        if len(asked) > 1:
            first, second = asked[0].field, asked[1].field
            raise field_error(
                second, f"{first} and {second} both say what a completion is; give one of them"
            )
        return self

    def _asked(self) -> Iterator["_Asked"]:
        """What each field asks for; raises the error of one that is wrong."""
        guided: dict[str, Any] = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice or None,
            "grammar": self.guided_grammar,
        }
        for name, value in guided.items():
            if value is not None:
                yield _asked(f"guided_{name}", KINDS[name], value)


class FormatFields(GrammarFields):
    """The fields that ask for structured output in objects, as OpenAI's requests have it."""

    response_format: Annotated[
        dict[str, Any] | None,
        Field(
            description='{"type": "json_object"} for any JSON object, {"type": "json_schema", '
            '"json_schema": {"name": ..., "schema": ...}} for what is valid by a JSON schema, '
            '{"type": "text"} for any text. The schema may stand beside either type of JSON too, '
            'as in {"type": "json_object", "schema": ...}.'
        ),
        Takes("an object, as OpenAI has it"),
    ] = None
    structured_outputs: Annotated[
        dict[str, Any] | None,
        Field(
            description="One of json (a schema), json_object (true), regex, choice and grammar, as "
            "vLLM has it. Beside JSON, disable_any_whitespace (true) or whitespace_pattern (a "
            "regular expression) says what may stand between its parts."
        ),
        Takes("an object"),
    ] = None

    def _asked(self) -> Iterator["_Asked"]:
        if self.response_format is not None:
            yield from _of_response_format(self.response_format)
        if self.structured_outputs is not None:
            yield from _of_structured_outputs(self.structured_outputs)
        yield from super()._asked()


@dataclass(frozen=True, slots=True)
class _Asked:
    field: str
    grammar: Grammar


def _asked(field: str, make: Callable[[Any], Grammar], value: Any) -> _Asked:
    """Raises the field's error for a value that is no source of such a grammar."""
    try:
        grammar = make(value)
        check_text(grammar.source)
    except ValueError as error:
        raise field_error(field, f"{field} is {brief(value)}: {error}") from None
    if len(grammar.source) > MAX_SOURCE_LEN:
        raise field_error(
            field,
            f"{field} has {len(grammar.source)} characters; at most {MAX_SOURCE_LEN} are taken",
        )
    return _Asked(field, grammar)


def _json(value: Any) -> Grammar:
    """A schema, as an object or as its text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("it must be a JSON schema, but is no JSON") from None
    if not isinstance(value, dict):
        raise ValueError("it must be a JSON schema, which is an object")
    try:
        return Grammar.json_schema(value)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:
        raise ValueError("its numbers must be finite") from None


def _regex(value: Any) -> Grammar:
    return Grammar.regex(_text(value))


def _choice(value: Any) -> Grammar:
    is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
    if not is_list or not 1 <= len(value) <= MAX_CHOICES:
        raise ValueError(f"it must be a list of 1 to {MAX_CHOICES} strings")
    return Grammar.choice(value)


def _grammar(value: Any) -> Grammar:
    return Grammar.lark(_text(value))


def _json_object(value: Any) -> Grammar:
    if value is not True:
        raise ValueError("it must be true, or left out")
    return Grammar.json_object()


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("it must be a string that is not empty")
    return value


KINDS: Mapping[str, Callable[[Any], Grammar]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
"""What may be asked for, by vLLM's names, and what makes a grammar of a value."""


SPACING: Mapping[str, type] = {"disable_any_whitespace": bool, "whitespace_pattern": str}
"""What says which white space JSON may have, by vLLM's names, and the type of each."""


def _of_response_format(value: Mapping[str, Any]) -> Iterator[_Asked]:
    kind = value.get("type")
    if kind not in FORMATS:
        raise field_error(
            "response_format.type",
            f"response_format.type is {brief(kind)}: it must be one of {', '.join(FORMATS)}",
        )
    schemas = _schemas_in(value)
    if kind == "text" and schemas:
        field = next(iter(schemas))
        raise field_error(
            field, f"{field} is given, but response_format.type is 'text'; make it 'json_schema'"
        )
    if kind == "json_object" and not schemas:
        yield _Asked("response_format", Grammar.json_object())
    for field, schema in schemas.items():
        yield _asked(field, _json, schema)


def _schemas_in(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema by the field that it stands in: OpenAI's, or that of llama.cpp and Together."""
    described, beside = value.get("json_schema"), value.get("schema")
    schemas = {} if beside is None else {"response_format.schema": beside}
    is_missing = value["type"] == "json_schema" and not schemas
    if described is not None or is_missing:
        schema = described.get("schema") if isinstance(described, dict) else None
        schemas["response_format.json_schema.schema"] = schema
    return schemas


def _of_structured_outputs(value: Mapping[str, Any]) -> Iterator[_Asked]:
    """Options beside what is asked for may be there if they are off."""
    used = {
        name: given for name, given in value.items() if given is not None and given is not False
    }
    spacing = {name: used.pop(name) for name in SPACING if name in used}
    for name, given in used.items():
        field = f"structured_outputs.{name}"
        if name not in KINDS:
            raise field_error(
                field,
                f"{field} is {brief(given)}: it is not served; structured_outputs takes one of "
                f"{', '.join(KINDS)}, and beside JSON {' or '.join(SPACING)}",
            )
        _check_spacing(spacing, name)
        yield _asked(field, partial(_spaced, KINDS[name], spacing), given)
    if spacing and not used:
        field = f"structured_outputs.{next(iter(spacing))}"
        raise field_error(
            field,
            f"{field} is given without the JSON that it is about: put the schema into "
            'structured_outputs.json, or "x-guidance": {"whitespace_flexible": false} into the '
            "schema where it is",
        )


def _check_spacing(spacing: Mapping[str, Any], kind: str) -> None:
    for name, value in spacing.items():
        field = f"structured_outputs.{name}"
        if kind not in ("json", "json_object"):
            raise field_error(field, f"{field} is about JSON, not about a {kind}; leave it out")
        if not isinstance(value, SPACING[name]):
            words = "a regular expression" if SPACING[name] is str else "true or false"
            raise field_error(field, f"{field} is {brief(value)}: it must be {words}")
    if len(spacing) > 1:
        raise field_error(
            field,
            f"structured_outputs has {' and '.join(spacing)}, which both say what white "
            "space there may be; send one of them",
        )


def _spaced(make: Callable[[Any], Grammar], spacing: Mapping[str, Any], value: Any) -> Grammar:
    grammar = make(value)
    return grammar.with_spacing(spacing.get("whitespace_pattern")) if spacing else grammar
