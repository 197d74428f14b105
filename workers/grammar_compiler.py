"""Compiled grammars of one vocabulary: made in threads of their own, and the latest are kept."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from workers.errors import InvalidRequestError
from workers.grammar import Grammar
from workers.grammar_library import GrammarLibrary
from workers.grammar_matcher import OutputMatcher
from workers.grammar_trials import GrammarTrials

if TYPE_CHECKING:
    from llguidance import LLMatcher

T = TypeVar("T")

MAX_COMPILED = 32
"""The most grammars that are kept compiled."""
NUM_THREADS = 2
"""How many grammars are compiled at a time, so that a slow one does not hold up all others."""


class GrammarCompiler:
    """Compiles grammars for one vocabulary, in threads of its own, and keeps the latest."""

    def __init__(
        self,
        load_tokenizer: Callable[[], Any | None],
        *,
        vocab_size: int,
        end_tokens: tuple[int, ...],
        has_trials: bool = False,
    ) -> None:
        """The vocabulary is read with the first grammar, unless `start_loading` was called before.

        Args:
            load_tokenizer: a tokenizer of transformers or tokenizers; None if there is none.
            vocab_size: tokens that a mask speaks of, those without a text included.
            end_tokens: what may follow a text that the grammar accepts.
            has_trials: whether each grammar is tried in a process of its own first, as those are
                that come from clients.
        """
        self._library = GrammarLibrary(load_tokenizer, vocab_size=vocab_size, end_tokens=end_tokens)
        self._trials = GrammarTrials(self._library) if has_trials else None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")

    def start_loading(self) -> None:
        """Begin to read the vocabulary, so that no request waits for it; returns at once."""
        load = self._library.load if self._trials is None else self._trials.start
        self._threads.submit(load)  # what is wrong with it is said to who asks

    def compile(self, grammar: Grammar, *, is_shared: bool = True) -> "Future[LLMatcher]":
        """Begin to compile a grammar, unless that was done already; returns at once. One that is
        not shared is compiled for its caller alone.

        The result is a matcher at its start, to be copied and not to be used itself. The future
        raises InvalidRequestError for a grammar that is wrong, too large or too complex.
        """
        if not is_shared:
            return self._threads.submit(self._compile, grammar)
        with self._lock:
            future = self._compiled.get(grammar)
            is_new = future is None
            if future is None:
                future = self._threads.submit(self._compile, grammar)
                self._compiled[grammar] = future
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        if is_new:
            future.add_done_callback(lambda future: self._forget_if_lost(grammar, future))
        return future

    def submit(self, work: "Callable[[], T]") -> "Future[T]":
        """Have something else done in one of the threads."""
        return self._threads.submit(work)

    def has_begun(self, grammar: Grammar) -> bool:
        """Whether a grammar is compiled, or being compiled."""
        with self._lock:
            return grammar in self._compiled

    def matcher(self, grammar: Grammar) -> OutputMatcher:
        """A matcher for one more output; waits until the grammar is compiled, and raises as that
        does."""
        return self.follow(self.compile(grammar).result())

    def follow(self, compiled: "LLMatcher") -> OutputMatcher:
        """A matcher for one more output of a compiled grammar.

        Where one output has used up the limits of what all of them share, the grammar is compiled
        anew for the next.
        """
        return self._library.follow(compiled, on_failure=lambda: self._drop(compiled))

    def _forget_if_lost(self, grammar: Grammar, future: "Future[LLMatcher]") -> None:
        """What has failed by no fault of the grammar is tried again by the next who asks."""
        if not future.cancelled() and isinstance(future.exception(), InvalidRequestError | None):
            return
        with self._lock:
            if self._compiled.get(grammar) is future:
                del self._compiled[grammar]

    def _drop(self, compiled: "LLMatcher") -> None:
        with self._lock:
            for grammar, future in list(self._compiled.items()):
                is_made = future.done() and future.exception() is None
                if is_made and future.result() is compiled:
                    del self._compiled[grammar]

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        if self._trials is not None:
            self._trials.run(grammar)
        return self._library.compile(grammar)
