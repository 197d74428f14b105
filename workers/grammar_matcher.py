"""How far the output of one sequence has come in its grammar, and what may come next."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from workers.errors import GrammarStuckError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

SPECIAL_TOKEN_MARK = b"\xff"
"""What the library writes before a special token that a grammar names, in place of its text."""
NAMED_REASONS = {"NoExtension": "no text fits it", "NoExtensionBias": "no text fits it"}
"""What the library's bare names for its reasons mean."""
SLOW_S = 0.001
"""Seconds of computing for each token of an output, from which on its masks are slow."""
MOST_MATCHING_S = 0.1
"""Seconds that matching tokens in a row may compute, besides SLOW_S for each. Nothing else of the
process runs meanwhile, and an ambiguous grammar takes longer with each token. Ordinary ones take
some hundredths of SLOW_S."""
MAX_MATCHED_AT_ONCE = 64
"""Tokens of a text that are matched where others wait: more than a round commits. Of a text that
was matched elsewhere before, there may be thousands."""


class OutputMatcher:
    """Follows the output tokens of a sequence, back as well as forth."""

    def __init__(
        self,
        matcher: "LLMatcher",
        vocabulary: "LLTokenizer",
        *,
        vocab_size: int,
        end_tokens: Sequence[int],
        on_failure: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`matcher` is at its start, goes by `vocabulary`, and belongs to this object from now on.

        `end_tokens` are what may follow where the grammar accepts; the library is not told of them.
        `on_failure` is told when the matcher is stuck. `clock` is of the time that a thread
        computes, in seconds.
        """
        self._on_failure = on_failure
        self._clock = clock
        self._behind_s = self._matching_behind_s = 0.0
        """By how much it has computed longer of late than SLOW_S for each token; tokens that take
        less make up for those before them, and not for those behind."""
        self._num_masks = self._num_pushed = 0
        self._final_error: GrammarStuckError | None = None
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._num_bytes = -(-vocab_size // 8)
        self._end_tokens = frozenset(end_tokens)
        self._tokens: list[int] = []
        """The tokens that were matched, and the end tokens behind them."""
        self._num_matched = 0
        """The number of tokens that were matched, without those end tokens."""

    @property
    def is_slow(self) -> bool:
        """Whether its masks take so long of late that others should not wait for them."""
        return self._behind_s > 0.0

    @property
    def num_tokens(self) -> int:
        """The tokens that are matched, end tokens included."""
        return len(self._tokens)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count what is computed within as the time of the masks that are made there."""
        began, num_masks, num_pushed = self._clock(), self._num_masks, self._num_pushed
        try:
            yield
        finally:
            num_tokens = max(self._num_masks - num_masks, self._num_pushed - num_pushed, 1)
            computed_s = self._clock() - began
            self._behind_s = max(0.0, self._behind_s + computed_s - SLOW_S * num_tokens)

    def move_to(self, output: Sequence[int]) -> bool:
        """Go back and forth to where exactly `output` is matched; returns whether it could be.

        Raises GrammarStuckError as `push` does.
        """
        if self._final_error is not None:
            raise self._final_error
        length = min(len(self._tokens), len(output))
        while self._tokens[:length] != output[:length]:
            length -= 1
        self._go_back(length)
        return all(self.push(token) for token in output[length:])

    def push(self, token: int) -> bool:
        """Match one more token; False, and nothing has changed, where the grammar forbids it.

        Raises GrammarStuckError as `allowed` does, and where matching takes too long; then at once
        whenever it is used again.
        """
        if self._final_error is not None:
            raise self._final_error
        if token in self._end_tokens:
            fits = self._matcher.is_accepting()
        else:
            has_ended = len(self._tokens) > self._num_matched or self._matcher.is_stopped()
            fits = not has_ended and self._consume(token)
            self._num_matched += fits
            self._check()
        if fits:
            self._tokens.append(token)
        return fits

    def _consume(self, token: int) -> bool:
        began = self._clock()
        fits: bool = self._matcher.try_consume_tokens([token]) == 1
        self._num_pushed += 1
        matching_s = self._clock() - began
        self._matching_behind_s = max(0.0, self._matching_behind_s + matching_s - SLOW_S)
        if self._matching_behind_s > MOST_MATCHING_S:
            self._final_error = GrammarStuckError(
                "it is so ambiguous that it takes too long", is_final=True
            )
            raise self._final_error
        return fits

    def allowed(self) -> bytearray:
        """The tokens that may come next, one bit each, the lowest first.

        Behind an end token another may come, and nothing else. Raises GrammarStuckError where the
        library has met a limit; the matcher is of no use any more then.
        """
        has_ended = len(self._tokens) > self._num_matched
        self._num_masks += 1
        mask = b"" if has_ended else self._matcher.compute_bitmask()
        self._check()
        bits = bytearray(self._spelt_out(mask)[: self._num_bytes].ljust(self._num_bytes, b"\0"))
        may_end = has_ended or self._matcher.is_accepting()
        for token in self._end_tokens:
            bit = 1 << token % 8
            bits[token // 8] = bits[token // 8] & ~bit | (bit if may_end else 0)
        return bits

    def forced(self) -> list[int]:
        """The tokens of the text that the grammar leaves no choice about; often none."""
        has_ended = len(self._tokens) > self._num_matched or self._matcher.is_stopped()
        if has_ended:
            return []
        tokens = self._matcher.compute_ff_tokens()
        if not any(map(self._vocabulary.is_special_token, tokens)):
            return tokens
        tokens = tokens[: self._matcher.validate_tokens(tokens)]
        text = self._matcher.compute_ff_bytes()[len(self._vocabulary.decode_bytes(tokens)) :]
        text = text.partition(SPECIAL_TOKEN_MARK)[0]
        return tokens + self._vocabulary.greedy_tokenize(text.decode(errors="ignore"))

    def _spelt_out(self, mask: bytes) -> bytes:
        """A mask where a text that is forced is no special token, though it has the name of one.

        The library has its tokenizer cut what is forced, which takes names in a text for the tokens
        themselves, and then refuses those as what they are: no text.
        """
        used = mask.rstrip(b"\0")
        if not used or used[-1].bit_count() != 1 or used.count(0) != len(used) - 1:
            return mask  # it leaves a choice
        token = 8 * (len(used) - 1) + used[-1].bit_length() - 1
        if not self._vocabulary.is_special_token(token):
            return mask
        forced = self.forced()
        return (1 << forced[0]).to_bytes(len(mask), "little") if forced else mask

    def _go_back(self, length: int) -> None:
        """Go back to where `length` tokens were matched."""
        num_back = self._num_matched - length
        if num_back > 0:
            self._matcher.rollback(num_back)
            self._num_matched = length
        del self._tokens[length:]

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().removesuffix("<non-verbose/>").strip()
            raise self.stuck(NAMED_REASONS.get(reason, reason))

    def stuck(self, reason: str) -> GrammarStuckError:
        """The error of a matcher that is of no use any more."""
        self._on_failure()
        return GrammarStuckError(reason)
