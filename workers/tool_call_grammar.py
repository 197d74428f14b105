"""Calls of functions as a grammar: what a model writes around the arguments, and their schemas."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Spaces in arguments are those of chat templates: left free, a model may write nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCall:
    """A call of one function: its arguments stand between two texts."""

    function: str
    schema: Mapping[str, Any]
    """What the arguments are valid by."""
    before: str = ""
    after: str = ""

    @property
    def spaced_schema(self) -> dict[str, Any]:
        """The schema, with the spaces of chat templates in place of its own options."""
        return {**self.schema, "x-guidance": SPACING}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCalls:
    """A text that is nothing but calls of functions."""

    calls: tuple[WrittenCall, ...]
    """The calls of which any may stand at each place."""
    is_one: bool = False
    """Whether there is exactly one call; else one or more."""
    before: str = ""
    between: str = ""
    after: str = ""
    """What stands before all calls, between two, and behind all."""
    tags: tuple[str, ...] = ()
    """Parts of these texts that are tokens by themselves, where the vocabulary has such."""

    @classmethod
    def of_source(cls, source: str) -> Self:
        """The calls that were written as `source`."""
        fields = json.loads(source)
        calls = tuple(WrittenCall(**call) for call in fields.pop("calls"))
        return cls(calls=calls, tags=tuple(fields.pop("tags")), **fields)

    def source(self) -> str:
        """The calls as a text; raises RecursionError for a schema that is nested too deeply,
        ValueError for one with numbers that JSON has not."""
        calls = [
            {
                "function": call.function,
                "schema": call.schema,
                "before": call.before,
                "after": call.after,
            }
            for call in self.calls
        ]
        fields = {
            "calls": calls,
            "is_one": self.is_one,
            "before": self.before,
            "between": self.between,
            "after": self.after,
            "tags": self.tags,
        }
        return json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    def grammars(self, names: Mapping[str, str]) -> list[dict[str, Any]]:
        """Entries of the library's list of grammars, the whole first.

        Args:
            names: what stands for each tag in Lark's syntax.
        """
        rules = "".join(f"{rule}\n" for rule in self._rules(names))
        schemas = [
            {"name": f"arguments{index}", "json_schema": call.spaced_schema}
            for index, call in enumerate(self.calls)
        ]
        return [{"lark_grammar": rules}, *schemas]

    def _rules(self, names: Mapping[str, str]) -> Iterator[str]:
        more = [] if self.is_one else ["(", *self._terms(self.between, names), "call", ")*"]
        start = [*self._terms(self.before, names), "call", *more, *self._terms(self.after, names)]
        yield f"start: {' '.join(start)}"
        yield f"call: {' | '.join(f'call{index}' for index in range(len(self.calls)))}"
        for index, call in enumerate(self.calls):
            before, after = (self._terms(text, names) for text in (call.before, call.after))
            yield f"call{index}: {' '.join([*before, f'@arguments{index}', *after])}"

    def _terms(self, text: str, names: Mapping[str, str]) -> list[str]:
        """A text in Lark's syntax, its tags apart."""
        parts = re.split(f"({'|'.join(map(re.escape, self.tags))})", text) if self.tags else [text]
        return [names[part] if part in self.tags else lark_string(part) for part in parts if part]


def lark_string(text: str) -> str:
    """A text as a string in Lark's syntax: JSON's, but that it takes no DEL as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
