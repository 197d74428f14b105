"""Forced tokens: what the grammar of a sequence leaves no choice about, drafted without a model.

A JSON schema spells out its keys, and a choice its ending once it is clear which it is. The grammar
forces the text; how the target cuts it into tokens is its own affair, so the usual cut is drafted.
"""

from deployments.router.sequence import Sequence
from workers.errors import GrammarStuckError
from workers.grammar_compiler import GrammarCompiler
from workers.grammar_matcher import MAX_MATCHED_AT_ONCE, OutputMatcher
from workers.types import NO_DRAFTS, DraftTokens

SOURCE = "grammar"
CONFIDENCE = 0.95
"""How likely each forced token is taken to be the target's, which may spell the same text with
other tokens. An assumption: it was not measured."""
LEAST_TOKENS = 3
"""Forced tokens for which it speaks: of fewer, another drafter makes more, as it goes beyond."""


class ForcedTokens:
    """Drafts for any number of sequences by their grammars; silent for those without."""

    source = SOURCE

    def __init__(self, compiler: GrammarCompiler) -> None:
        """`compiler` has compiled the grammars before, when they were checked."""
        self._compiler = compiler
        self._matchers: dict[str, OutputMatcher | None] = {}
        """None for a sequence whose grammar cannot be followed any further."""

    def __len__(self) -> int:
        """Sequences of which something is kept."""
        return len(self._matchers)

    def draft(self, sequence: Sequence, max_tokens: int) -> DraftTokens:
        grammar = sequence.params.sampling.grammar
        if grammar is None:
            return NO_DRAFTS
        if sequence.seq_id not in self._matchers:
            if not self._compiler.compile(grammar).done():
                return NO_DRAFTS
            self._matchers[sequence.seq_id] = self._compiler.matcher(grammar)
        if (matcher := self._matchers[sequence.seq_id]) is None:
            return NO_DRAFTS
        output = sequence.tokens[sequence.prompt_len :]
        matched = output[: matcher.num_tokens + MAX_MATCHED_AT_ONCE]
        try:
            is_there = matcher.move_to(matched) and matched == output
            tokens = tuple(matcher.forced()[:max_tokens]) if is_there else ()
        except GrammarStuckError:  # the target will say so
            self._matchers[sequence.seq_id] = None
            return NO_DRAFTS
        if len(tokens) < min(LEAST_TOKENS, max_tokens):
            return NO_DRAFTS
        return DraftTokens(tokens=tokens, confidences=(CONFIDENCE,) * len(tokens), source=SOURCE)

    def forget(self, sequence: Sequence) -> None:
        self._matchers.pop(sequence.seq_id, None)
