"""What a completion has to match: a grammar as text, in the form that crosses processes."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from workers.tool_call_grammar import ToolCalls

GrammarKind = Literal["json_schema", "regex", "choice", "lark", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What the whole of a completion has to match, end to end.

    The text may end exactly where the grammar accepts it. Workers compile the source and keep what
    comes of it; a request carries the text alone.
    """

    kind: GrammarKind
    source: str
    """A JSON schema, a regular expression, a JSON list of strings, a grammar in Lark's syntax, or
    the text of ToolCalls, by `kind`."""
    starts_after: str = ""
    """The grammar holds behind the first time that the completion has this text, "</think>" say,
    and some spaces; any text may come before. Empty for the whole of the completion."""
    opening: str = ""
    """If set, text may come before the grammar only where the completion begins with this,
    "<think>" say: else the grammar holds from the start."""

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any], *, starts_after: str = "") -> Self:
        """JSON that is valid by a schema; raises RecursionError for one that is nested too deeply,
        ValueError for one with numbers that JSON has not."""
        return cls(kind="json_schema", source=_dumped(schema), starts_after=starts_after)

    def with_spacing(self, pattern: str | None) -> Self:
        """A grammar of JSON with the white space that a regular expression matches between its
        parts, or with none. The library takes it as a word of the schema, where other options of
        it may stand; raises ValueError if that is no object."""
        schema = json.loads(self.source)
        options = schema.get("x-guidance", {})
        if not isinstance(options, dict):
            raise ValueError("its x-guidance must be an object")
        is_none = {"whitespace_flexible": False}
        spacing = is_none if pattern is None else {"whitespace_pattern": pattern}
        schema["x-guidance"] = {**options, **spacing}
        return replace(self, source=_dumped(schema))

    @classmethod
    def json_object(cls, *, starts_after: str = "") -> Self:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, starts_after=starts_after)

    @classmethod
    def regex(cls, pattern: str, *, starts_after: str = "") -> Self:
        """Text that a regular expression matches from its start to its end."""
        return cls(kind="regex", source=pattern, starts_after=starts_after)

    @classmethod
    def choice(cls, texts: Sequence[str], *, starts_after: str = "") -> Self:
        """One of several texts."""
        source = json.dumps(list(texts), ensure_ascii=False)
        return cls(kind="choice", source=source, starts_after=starts_after)

    @classmethod
    def lark(cls, rules: str, *, starts_after: str = "") -> Self:
        """Text that the rule `start` of a context-free grammar derives."""
        return cls(kind="lark", source=rules, starts_after=starts_after)

    @classmethod
    def tool_calls(cls, calls: ToolCalls, *, starts_after: str = "") -> Self:
        """Nothing but calls of functions; raises as `source` of ToolCalls does."""
        return cls(kind="tool_calls", source=calls.source(), starts_after=starts_after)

    def functions(self) -> Iterator[tuple[str, Self]]:
        """The name of each function that it calls, and the grammar of its arguments; none where
        it is not about calls."""
        if self.kind == "tool_calls":
            for call in ToolCalls.of_source(self.source).calls:
                yield call.function, type(self).json_schema(call.spaced_schema)


def _dumped(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
