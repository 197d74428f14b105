"""Drafts for a round that has yet to begin, made while the target verifies the one before.

The drafter goes on as if all it drafted were accepted, guesses the target's next token itself, and
drafts on from there. What the target commits then shows whether the guess was right; under coupled
noise it often is.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deployments.router.drafting.remote import NO_DRAFT, Draft, Drafting, Drafts, Proposed, Wanted
from deployments.router.sequence import Sequence as LiveSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A sequence in a round, and what its drafter foresees."""

    sequence: LiveSequence
    gamma: int
    """Drafts to have in hand for the next round."""
    stop_below: float = 0.0
    """See ProposeRequest."""
    foreseen: Draft = NO_DRAFT
    num_verified: int = 0
    """Of the foreseen tokens, those the target verifies in this round."""

    @property
    def num_lacking(self) -> int:
        """Tokens to draft yet, the target's next one included."""
        return self.gamma + self.num_verified + 1 - len(self.foreseen.tokens)


@dataclass(slots=True, kw_only=True)
class _Ahead:
    base_len: int
    """Committed tokens when it was asked for."""
    foreseen: Draft
    """From there on."""
    more: asyncio.Task[Proposed]
    """Brings what follows."""

    def agrees(self, sequence: LiveSequence) -> bool:
        """Whether what was committed since is what was foreseen, as far as that goes."""
        committed = tuple(sequence.tokens[self.base_len :])
        length = min(len(committed), len(self.foreseen.tokens))
        return committed[:length] == self.foreseen.tokens[:length]


class AheadDrafting:
    """Nothing here can fail a round: drafts that are late or wrong are not there, that is all."""

    def __init__(self, drafting: Drafting, *, on_done: Callable[[LiveSequence], None]) -> None:
        """`on_done` is told of sequences that ended while a drafter went on."""
        self._drafting = drafting
        self._on_done = on_done
        self._ahead: dict[str, _Ahead] = {}
        self._tasks: set[asyncio.Task[Proposed]] = set()

    def __contains__(self, sequence: LiveSequence) -> bool:
        return sequence.seq_id in self._ahead

    def start(self, courses: Sequence[Course]) -> bool:
        """Let drafters go on; returns at once, whether any do."""
        lacking = [
            course
            for course in courses
            if course.num_lacking > 0 and course.sequence.num_remaining > course.num_verified + 1
        ]
        if not lacking:
            return False
        task = asyncio.create_task(
            self._run(
                [
                    Wanted(
                        sequence=course.sequence,
                        gamma=course.num_lacking,
                        stop_below=course.stop_below,
                        assumed=course.foreseen.tokens,
                    )
                    for course in lacking
                ]
            )
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        for course in lacking:
            self._ahead[course.sequence.seq_id] = _Ahead(
                base_len=len(course.sequence.tokens), foreseen=course.foreseen, more=task
            )
        return True

    async def take(self, wanted: Sequence[Wanted]) -> Drafts:
        """Drafts in hand for these sequences; waits for some that may be right."""
        drafts = {}
        for of_sequence in wanted:
            sequence = of_sequence.sequence
            ahead = self._ahead.pop(sequence.seq_id, None)
            if ahead is None or not ahead.agrees(sequence):
                continue
            proposed = await asyncio.shield(ahead.more)
            ahead.foreseen += proposed.drafts.get(sequence.seq_id, NO_DRAFT)
            num_committed = len(sequence.tokens) - ahead.base_len
            if ahead.agrees(sequence) and len(ahead.foreseen.tokens) > num_committed:
                drafts[sequence.seq_id] = ahead.foreseen.after(num_committed).first(
                    of_sequence.gamma
                )
        return drafts

    def forget(self, sequence: LiveSequence) -> None:
        """A sequence has ended."""
        self._ahead.pop(sequence.seq_id, None)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _run(self, wanted: Sequence[Wanted]) -> Proposed:
        try:
            return await self._drafting.propose(wanted)
        finally:
            for of_sequence in wanted:
                if of_sequence.sequence.is_done:
                    self._on_done(of_sequence.sequence)
