"""Finding the calls of tools in what a model writes.

A text is read from its beginning each time that it has grown, and what is found then holds whatever
follows. So it does not matter in which pieces a text comes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from workers.tool_call_grammar import ToolCalls


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function that a model may call."""

    name: str
    schema: Mapping[str, Any]
    """The JSON schema of its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCall:
    """A call in a text that may not have ended."""

    name: str
    arguments: str
    """The arguments as far as they have come, as the model wrote them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The calls at one place of a text."""

    calls: tuple[FoundCall, ...] = ()
    end: int | None = None
    """Where other text goes on; None while it is not known, for the block may go on. A block of
    no calls without an end may yet become one, or turn out to be none."""

    @property
    def is_undecided(self) -> bool:
        return not self.calls and self.end is None


UNDECIDED = Block()


class ToolCallFormat(Protocol):
    """How a model writes calls of tools."""

    name: str
    tag: str
    """What calls stand behind; empty where they stand at the beginning of the text."""

    def read(self, text: str, start: int) -> Block | None:
        """The calls behind a tag that ends at `start`; None if there are none."""
        ...

    def write(self, functions: Sequence[Function], template: str) -> ToolCalls:
        """A message of nothing but calls of these functions, as this format has it.

        Args:
            template: the model's chat template, which decides between variants.
        """
        ...

    def make_id(self) -> str:
        """An id for a call."""
        ...

    def is_used_in(self, template: str) -> bool:
        """Whether a chat template tells its model to write calls so."""
        ...


def find_calls(
    text: str, tool_format: ToolCallFormat, *, is_final: bool
) -> tuple[str, list[FoundCall]]:
    """What a text says beside its calls, and the calls.

    As long as the text is not final, the content leaves out what may become part of a call. Spaces
    around calls are left out; a line break separates what stood before and behind them.
    """
    pieces: list[str] = []
    calls: list[FoundCall] = []
    position = search_from = 0
    while (start := _find_tag(text, tool_format.tag, search_from)) is not None:
        block = tool_format.read(text, start + len(tool_format.tag))
        if block is None or (block.is_undecided and is_final):
            search_from = start + max(1, len(tool_format.tag))
            continue
        pieces.append(text[position:start])
        calls += block.calls
        if block.end is None:
            return _joined(pieces), calls
        position = search_from = block.end
    rest = text[position:]
    if not is_final:
        rest = rest[: len(rest) - num_held(rest, tool_format.tag)].rstrip()
    elif not calls:
        return text, []
    return _joined([*pieces, rest]), calls


def _find_tag(text: str, tag: str, search_from: int) -> int | None:
    if not tag:
        return 0 if search_from == 0 else None
    found = text.find(tag, search_from)
    return found if found >= 0 else None


def _joined(pieces: Sequence[str]) -> str:
    """Texts between calls as one. Only the spaces before the first may be meant."""
    first, *others = pieces
    kept = [first.rstrip(), *(piece.strip() for piece in others)]
    return "\n".join(piece for piece in kept if piece)


def num_held(text: str, tag: str) -> int:
    """The length of the longest end of a text that begins a tag."""
    longest = min(len(tag) - 1, len(text))
    lengths = range(longest, 0, -1)
    return next((length for length in lengths if tag.startswith(text[-length:])), 0)
