"""A model's text as a message: thoughts, content and calls of tools, commit by commit."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from deployments.router.chat.message import ToolCall
from deployments.router.chat.reasoning import ReasoningTags, SplitText, split_reasoning
from deployments.router.chat.tool_calls import FoundCall, ToolCallFormat, find_calls
from deployments.router.sequence import Delta, FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFormat:
    """What is looked for in a text."""

    tool_calls: ToolCallFormat | None = None
    """How calls are written; None where they are left in the text."""
    max_tool_calls: int | None = None
    """Calls after the first so many are dropped."""
    is_call_named: bool = False
    """Whether the client has named the function that is called."""
    reasoning: ReasoningTags | None = None
    """The tags around thoughts; None where those are left in the text."""
    is_reasoning_open: bool = False
    """Whether the prompt has ended within thoughts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDelta:
    """The part of a message that a piece of text adds."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[tuple[int, ToolCall], ...] = ()
    """Calls that have begun or gone on, each with its index. The arguments are those that are new,
    and the name is empty in all but a call's first."""

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


@dataclass(slots=True, kw_only=True)
class MessageText:
    """The message that one completion's text is, as it grows.

    Each time the whole text is read anew, and what has been added since is told. So the message
    does not depend on the pieces in which the text comes.
    """

    format: MessageFormat
    reasoning_end: int = 0
    """Where the thoughts have ended in the text so far, behind their tag; 0 if there are none."""
    _text: str = ""
    _token_offsets: list[int] = field(default_factory=list)
    """Where each token of the text begins."""
    _content_len: int = 0
    _reasoning_len: int = 0
    _calls: list[ToolCall] = field(default_factory=list)

    @property
    def num_tool_calls(self) -> int:
        """Calls that have begun."""
        return len(self._calls)

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """Why the message has ended, for `reason` why its text has; None while it goes on.

        As OpenAI has it: `tool_calls` where the text ended by itself and has some, but `stop` where
        the client itself named the function.
        """
        is_calls = self.num_tool_calls and not self.format.is_call_named
        return "tool_calls" if is_calls and reason is FinishReason.STOP else reason

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Tokens that begin within thoughts, tags included; None where these are not looked for."""
        if self.format.reasoning is None:
            return None
        return sum(offset < self.reasoning_end for offset in self._token_offsets)

    def take(self, delta: Delta) -> MessageDelta:
        """What a commit adds to the message."""
        self._token_offsets += [record.text_offset for record in delta.records]
        return self.push(delta.text, is_final=delta.finish_reason is not None)

    def push(self, text: str, *, is_final: bool = False) -> MessageDelta:
        """What more of the text adds to the message; after the final piece nothing is held back."""
        if self.format.tool_calls is None and self.format.reasoning is None:
            return MessageDelta(content=text)
        self._text += text
        split = SplitText(rest=self._text)
        if self.format.reasoning is not None:
            split = split_reasoning(
                self._text,
                self.format.reasoning,
                is_open=self.format.is_reasoning_open,
                is_final=is_final,
            )
        content = split.rest
        new_calls: tuple[tuple[int, ToolCall], ...] = ()
        if self.format.tool_calls is not None:
            content, calls = find_calls(content, self.format.tool_calls, is_final=is_final)
            calls = calls[: self.format.max_tool_calls]
            new_calls = tuple(self._new_of(calls, self.format.tool_calls))
        delta = MessageDelta(
            content=content[self._content_len :],
            reasoning=split.thoughts[self._reasoning_len :],
            tool_calls=new_calls,
        )
        self._content_len, self._reasoning_len = len(content), len(split.thoughts)
        self.reasoning_end = split.end
        return delta

    def _new_of(
        self, found: Sequence[FoundCall], tool_format: ToolCallFormat
    ) -> Iterator[tuple[int, ToolCall]]:
        """What is new of the calls that were found, of which none has become shorter."""
        for index, call in enumerate(found):
            if index == len(self._calls):
                new = ToolCall(id=tool_format.make_id(), name=call.name, arguments=call.arguments)
                self._calls.append(new)
                yield index, new
                continue
            known = self._calls[index]
            if len(call.arguments) > len(known.arguments):
                self._calls[index] = replace(known, arguments=call.arguments)
                more = call.arguments[len(known.arguments) :]
                yield index, ToolCall(id=known.id, name="", arguments=more)


def num_reasoning_tokens(texts: Iterable[MessageText]) -> int | None:
    """Tokens of thoughts in all messages of a request; None where thoughts are not looked for."""
    numbers = [text.num_reasoning_tokens for text in texts]
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None
