"""Suffix drafting: what followed the last words in finished texts, or in the text itself.

Agents ask for nearly the same again and again: the same tools, formats, files. What followed a
context in the finished texts of the same tenant and cache salt is counted; the counts say how
likely it follows again, and so how far to draft (Oliaro et al., "SuffixDecoding", 2024, arXiv:
2411.04975). The text itself is looked up as by prompt lookup; of the two drafts the one is taken of
which more tokens are expected to be accepted.
"""

from array import array
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from deployments.router.drafting.accuracy import (
    MAX_MATCH_LEN,
    Guess,
    MatchAccuracy,
    expected_len,
    is_sure,
)
from deployments.router.drafting.context_tree import ContextTree
from deployments.router.drafting.finished_texts import MAX_TOKENS, FinishedTexts, Share
from deployments.router.drafting.lookup import PromptLookup
from deployments.router.sequence import Sequence
from workers.types import NO_DRAFTS, DraftTokens

SOURCE = "suffix"
LEAST_SURVIVAL = 0.1
"""A draft ends where it is less likely than this to be accepted up to there."""


@dataclass(frozen=True, slots=True)
class _Foreseen:
    """What was guessed of a sequence, and the length that its text had."""

    guesses: tuple[Guess, ...]
    text_len: int


class SuffixDrafter:
    """Drafts for any number of sequences from the texts of those that have ended."""

    source = SOURCE

    def __init__(self, *, is_last: bool = True, max_tokens: int = MAX_TOKENS) -> None:
        """Unless it is the last drafter or the request's own, it is silent where it is not sure.

        `max_tokens` is how many tokens of finished texts are kept, of all sequences together.
        """
        self._is_last = is_last
        self._own = PromptLookup()
        self._finished = FinishedTexts(max_tokens=max_tokens)
        self._accuracy = MatchAccuracy()
        self._foreseen: dict[str, _Foreseen] = {}

    def __len__(self) -> int:
        """Sequences that run of which something is kept."""
        return len(self._foreseen) + len(self._own)

    def draft(self, sequence: Sequence, max_tokens: int) -> DraftTokens:
        by_others = self._by_others(sequence, max_tokens)
        by_itself = self._own.draft(sequence, max_tokens)
        drafts = max(by_itself, by_others, key=expected_len)
        is_alone = self._is_last or sequence.params.drafter == SOURCE
        return drafts if is_alone or is_sure(drafts, max_tokens) else NO_DRAFTS

    def learn(self) -> None:
        """Go on reading the texts that have ended."""
        self._finished.read()

    def forget(self, sequence: Sequence) -> None:
        """Free what is kept of the sequence; if its text has ended, others may draft from it."""
        self._own.forget(sequence)
        self._foreseen.pop(sequence.seq_id, None)
        if sequence.is_done:
            self._finished.add(_share(sequence), sequence.tokens)

    def _by_others(self, sequence: Sequence, max_tokens: int) -> DraftTokens:
        """What finished texts let expect."""
        tokens = sequence.tokens
        foreseen = self._foreseen.pop(sequence.seq_id, None)
        if foreseen is not None:
            self._accuracy.learn(foreseen.guesses, tokens[foreseen.text_len :])
        guesses = self._guesses(self._finished.trees(_share(sequence)), tokens, max_tokens)
        if not guesses:
            return NO_DRAFTS
        self._foreseen[sequence.seq_id] = _Foreseen(tuple(guesses), len(tokens))
        return DraftTokens(
            tokens=tuple(guess.token for guess in guesses),
            confidences=tuple(map(self._accuracy.of, guesses)),
            source=SOURCE,
        )

    def _guesses(
        self, trees: Tokens[ContextTree], tokens: Tokens[int], max_tokens: int
    ) -> list[Guess]:
        """The likeliest tokens one after the other, while it is likely enough that all are right.

        Each is what the context foresees that is known to be right most often, long or short.
        """
        context = array("i", tokens[-MAX_MATCH_LEN:])
        guesses: list[Guess] = []
        survival = 1.0
        while len(guesses) < max_tokens:
            candidates = [
                Guess(found.token, found.length, found.total, found.times / found.total)
                for tree in trees
                for found in tree.followers(context)
            ]
            if not candidates:
                break
            best = max(reversed(candidates), key=self._accuracy.of)
            survival *= self._accuracy.of(best)
            if survival < LEAST_SURVIVAL:
                break
            guesses.append(best)
            context = context[-MAX_MATCH_LEN + 1 :]
            context.append(best.token)
        return guesses


def _share(sequence: Sequence) -> Share:
    return sequence.params.tenant.name, sequence.params.cache_salt
