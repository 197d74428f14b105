"""Tokens to text, one commit at a time: never half a character, never part of a stop string."""

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Tokens of the prompt decoded along with the first output, for tokenizers that treat the first
# token of a text differently (a leading space, for one).
NUM_CONTEXT_TOKENS = 6


class Decoder(Protocol):
    """The part of a tokenizer that turns tokens into text."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class IncrementalDecoder:
    """Emits text as soon as it can no longer change.

    A token's text is what it adds to the text of the tokens before it; while that ends in a
    replacement character, a multi-byte character may still be unfinished and nothing is emitted.
    (`tokenizers.DecodeStream` emits the prompt again when that ends inside a character.)
    """

    def __init__(self, decoder: Decoder, prompt: Sequence[int]) -> None:
        self._decoder = decoder
        self._tokens = list(prompt[-NUM_CONTEXT_TOKENS:])
        self._context_start = 0
        self._emitted_until = len(self._tokens)

    def push(self, token: int) -> str:
        self._tokens.append(token)
        return self._emit(is_final=False)

    def finish(self) -> str:
        """The rest of the text; an unfinished character shows as replacement characters."""
        return self._emit(is_final=True)

    def _emit(self, *, is_final: bool) -> str:
        context = self._decode(self._tokens[self._context_start : self._emitted_until])
        text = self._decode(self._tokens[self._context_start :])
        is_settled = is_final or not text.endswith(REPLACEMENT)
        num_known = len(context)
        if context.endswith(REPLACEMENT):  # the prompt may have begun a character
            num_known = _num_common(context, text)
        if len(text) <= num_known or not is_settled:
            return ""
        self._context_start = self._emitted_until
        self._emitted_until = len(self._tokens)
        return text[num_known:]

    def _decode(self, tokens: list[int]) -> str:
        return self._decoder.decode(tokens, skip_special_tokens=True)


def _num_common(first: str, second: str) -> int:
    """The number of characters at the start of both texts that are equal."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


class StopStrings:
    """Cuts a stream of text at the first stop string and holds back what may become one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.has_stopped = False

    def push(self, text: str) -> str:
        """The text that is certain to come before any stop string."""
        text = self._held + text
        found = [index for index in (text.find(stop) for stop in self._stop) if index >= 0]
        if found:
            self._held, self.has_stopped = "", True
            return text[: min(found)]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0


class CompletionText:
    """A completion's text as its tokens come: only what is certain, without stop strings."""

    def __init__(self, decoder: Decoder, *, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._decoder = IncrementalDecoder(decoder, prompt)
        self._stop = StopStrings(stop)

    @property
    def has_stopped(self) -> bool:
        """True once a stop string was found; the text has ended before it."""
        return self._stop.has_stopped

    def push(self, token: int) -> str:
        """The text that has become certain with this token, that of earlier tokens included."""
        return self._stop.push(self._decoder.push(token))

    def finish(self) -> str:
        """The text that was held back, now that no token follows; none after a stop string."""
        if self.has_stopped:
            return ""
        text = self._stop.push(self._decoder.finish())
        return text if self.has_stopped else text + self._stop.finish()
