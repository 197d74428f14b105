"""Masks of the tokens that grammars allow, for every position that a step decides.

The state of a match is soft, as the cache is: it follows from the output tokens, and is made anew
from them where it was lost. What a step runs ahead, drafts that may be rejected, is matched too,
and taken back by the next step as far as other tokens were committed.
"""

from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from workers.errors import GrammarStuckError
from workers.grammar import Grammar
from workers.grammar_compiler import GrammarCompiler
from workers.grammar_matcher import MAX_MATCHED_AT_ONCE, OutputMatcher

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarText(Protocol):
    """A sequence whose output has to match a grammar; what is kept of it goes by its identity."""

    @property
    def tokens(self) -> Sequence[int]:
        """The sequence's tokens so far, prompt first, and drafts behind them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ahead:
    """A mask that is made in a thread before a step needs it."""

    output: Sequence[int]
    mask: "Future[Tensor]"
    """What may follow the output.  # [ceil(vocab / 8)] uint8"""


class GrammarMasks:
    """The masks of a worker's sequences."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._compiling: WeakKeyDictionary[GrammarText, Future[LLMatcher]] = WeakKeyDictionary()
        """Kept for each sequence: the compiler forgets grammars where there are many."""
        self._matchers: WeakKeyDictionary[GrammarText, OutputMatcher] = WeakKeyDictionary()
        self._ahead: WeakKeyDictionary[GrammarText, _Ahead] = WeakKeyDictionary()
        """The newest mask of each sequence for which threads make them."""
        self.on_ready: Callable[[], object] = lambda: None
        """Called when a grammar is compiled, or a mask made, that was not ready when it was asked
        for; in a thread of the compiler's."""

    def __len__(self) -> int:
        """Sequences whose match is kept."""
        return len(self._matchers)

    def start_loading(self) -> None:
        """See GrammarCompiler."""
        self._compiler.start_loading()

    def is_ready(
        self, sequence: GrammarText, grammar: Grammar | None, *, is_shared: bool = True
    ) -> bool:
        """Whether the grammar is compiled, or it is known why not; else it will be.

        A grammar that is not shared is compiled for this sequence alone.
        """
        if grammar is None or sequence in self._matchers:
            return True
        return self._compiled(sequence, grammar, is_shared=is_shared).done()

    def is_slow(self, sequence: GrammarText) -> bool:
        """Whether each mask of the sequence takes so long that others should not wait for it."""
        matcher = self._matchers.get(sequence)
        return matcher is not None and matcher.is_slow

    def has_next(
        self,
        sequence: GrammarText,
        grammar: Grammar,
        *,
        remaining: Sequence[int],
        prompt_len: int,
    ) -> bool:
        """Whether the mask behind the sequence's tokens and the remaining ones can be had at once,
        or within little time; the grammar is ready.

        Else it will be: where masks are slow, or there is much to match anew, as of a text that
        was suspended, it is made in a thread, while steps serve others.
        """
        ahead = self._ahead.get(sequence)
        if ahead is not None and not ahead.mask.done():
            return False
        if self._compiled(sequence, grammar).exception() is not None:
            return True  # a step tells the sequence why
        matcher = self._matcher_of(sequence, grammar)
        output_len = len(sequence.tokens) + len(remaining) - prompt_len
        if not matcher.is_slow and output_len - matcher.num_tokens <= MAX_MATCHED_AT_ONCE:
            return True
        output = [*sequence.tokens, *remaining][prompt_len:]
        if ahead is None or ahead.output != output:
            making = self._compiler.submit(partial(_next, matcher, output))
            ahead = self._ahead[sequence] = _Ahead(output=output, mask=making)
            making.add_done_callback(lambda _: self.on_ready())
        return ahead.mask.done()

    def wait(self, sequence: GrammarText, grammar: Grammar) -> None:
        """Wait until a sequence's next mask can be had, as `is_ready` and `has_next` tell."""
        futures.wait([self._compiled(sequence, grammar)])
        if (ahead := self._ahead.get(sequence)) is not None:
            futures.wait([ahead.mask])

    def _compiled(
        self, sequence: GrammarText, grammar: Grammar, *, is_shared: bool = True
    ) -> "Future[LLMatcher]":
        future = self._compiling.get(sequence)
        if future is None:
            future = self._compiler.compile(grammar, is_shared=is_shared)
            self._compiling[sequence] = future
            if not future.done():
                future.add_done_callback(lambda _: self.on_ready())
        return future

    def after_each(
        self,
        sequence: GrammarText,
        grammar: Grammar | None,
        *,
        prompt_len: int,
        num_drafts: int,
    ) -> list[Tensor | None]:
        """What may follow the cached tokens without the last `num_drafts`, and after each of those.

        None without a grammar, and where it is not ready. Behind a forbidden draft there is None
        too: no token there is ever looked at. Raises InvalidRequestError for a grammar that cannot
        be used, and GrammarStuckError for one that cannot be followed.
        # num_drafts + 1 of [ceil(vocab / 8)] uint8
        """
        masks: list[Tensor | None] = [None] * (num_drafts + 1)
        if grammar is None or not self.is_ready(sequence, grammar):
            return masks
        output = sequence.tokens[prompt_len:]
        num_committed = len(output) - num_drafts
        matcher = self._matcher_of(sequence, grammar)
        # a matcher that is stuck is kept: who asks again is told so again, and at once
        masks[0] = first = self._first(sequence, matcher, output[:num_committed])
        with matcher.timed():
            for index, draft in enumerate(output[num_committed:], start=1):
                try:
                    if not matcher.push(draft):
                        break
                    masks[index] = _mask(matcher)
                except GrammarStuckError as error:  # the sequence's end only if it comes there
                    if not error.is_final:
                        del self._matchers[sequence]
                    masks[index] = torch.zeros_like(first)
                    break
        return masks

    def _first(
        self, sequence: GrammarText, matcher: OutputMatcher, output: Sequence[int]
    ) -> Tensor:
        """What may follow the committed output, where the matcher is then."""
        ahead = self._ahead.pop(sequence, None)
        if ahead is not None:
            futures.wait([ahead.mask])  # no two threads use a matcher at a time
            if ahead.output == output:
                return ahead.mask.result()
        return _next(matcher, output)

    def _matcher_of(self, sequence: GrammarText, grammar: Grammar) -> OutputMatcher:
        matcher = self._matchers.get(sequence)
        if matcher is None:
            matcher = self._compiler.follow(self._compiled(sequence, grammar).result())
            self._matchers[sequence] = matcher
        return matcher


def _next(matcher: OutputMatcher, output: Sequence[int]) -> Tensor:
    """What may follow an output; raises GrammarStuckError where that cannot be told.

    # [ceil(vocab / 8)] uint8
    """
    with matcher.timed():
        if not matcher.move_to(output):
            # the library itself has allowed it, as some rules of special tokens bring it to
            raise matcher.stuck("it does not take the text so far, or a limit is reached")
        return _mask(matcher)


def _mask(matcher: OutputMatcher) -> Tensor:
    return torch.frombuffer(matcher.allowed(), dtype=torch.uint8)
