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

    def __init__(
        self, decoder: Decoder, prompt: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
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
        return self._decoder.decode(tokens, skip_special_tokens=self._skip_special_tokens)


def split_text(
    decoder: Decoder, token_ids: Sequence[int], *, skip_special_tokens: bool = True
) -> tuple[str, ...]:
    """What each token adds to the text of all of them."""
    texts = IncrementalDecoder(decoder, (), skip_special_tokens=skip_special_tokens)
    parts = [texts.push(token) for token in token_ids]
    return (*parts[:-1], parts[-1] + texts.finish()) if parts else ()


def _num_common(first: str, second: str) -> int:
    """The number of characters at the start of both texts that are equal."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


class StopStrings:
    """Cuts a stream of text at the first stop string and holds back what may become one."""

    def __init__(self, stop: Sequence[str], *, include_stop: bool = False) -> None:
        """If `include_stop`, the text is cut behind the stop string instead of before it."""
        self._stop = sorted(stop, key=len)
        self._include_stop = include_stop
        self._held = ""
        self.has_stopped = False

    def push(self, text: str) -> str:
        """The text that is certain to come before any stop string."""
        text = self._held + text
        found = [(index, stop) for stop in self._stop if (index := text.find(stop)) >= 0]
        if found:
            self._held, self.has_stopped = "", True
            index, stop = min(found, key=lambda place: place[0])  # of equals the shortest
            return text[: index + len(stop) if self._include_stop else index]
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

    def __init__(
        self,
        decoder: Decoder,
        *,
        prompt: Sequence[int],
        stop: Sequence[str],
        include_stop: bool = False,
        num_unstopped: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        """No stop string is looked for in the text of the first `num_unstopped` tokens."""
        self._decoder = IncrementalDecoder(decoder, prompt, skip_special_tokens=skip_special_tokens)
        self._stop = StopStrings(stop, include_stop=include_stop)
        self._num_unstopped = num_unstopped

    @property
    def has_stopped(self) -> bool:
        """True once a stop string was found; the text has ended before it."""
        return self._stop.has_stopped

    def push(self, token: int) -> str:
        """The text that has become certain with this token, that of earlier tokens included."""
        text = self._decoder.push(token)
        if self._num_unstopped > 0:
            self._num_unstopped -= 1
            return text
        return self._stop.push(text)

    def finish(self) -> str:
        """The text that was held back, now that no token follows; none after a stop string."""
        if self.has_stopped:
            return ""
        text = self._decoder.finish()
        if self._num_unstopped > 0:
            return text
        text = self._stop.push(text)
        return text if self.has_stopped else text + self._stop.finish()
