"""The draft side of the rounds: how far, by whom, and which of the drafts are verified."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from deployments.router.drafting.ahead import AheadDrafting, Course
from deployments.router.drafting.overlap import Overlap
from deployments.router.drafting.remote import (
    NO_DRAFT,
    NOTHING,
    DraftClient,
    Drafting,
    Drafts,
    Wanted,
)
from deployments.router.policy.gamma import (
    Candidate,
    Decision,
    Drafted,
    GammaController,
    ObservedRound,
    Reason,
)
from deployments.router.sequence import Sequence as LiveSequence

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """What decides about drafts."""

    gamma: GammaController
    overlap: Overlap
    max_gamma: int
    max_drafted_len: int
    """The longest sequence, drafts included, that both workers can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculated:
    """The drafts of a round, and what they took."""

    reason: Reason
    drafts: Drafts
    """To verify, by sequence id."""
    courses: tuple[Course, ...] = ()
    """Of the sequences that were to be drafted."""
    num_drafted: int = 0
    """Sequences that drafters were asked for."""
    longest_draft: int = 0
    is_typical: bool = False
    """Whether the drafters did nothing but make these drafts."""
    is_after_overlap: bool = False
    """Whether some of them were made during the last verification."""
    draft_s: float = 0.0
    compute_s: float = 0.0


class Speculation:
    """Decides and fetches the drafts of every round of a loop.

    Nothing here can fail a round: whatever policies and drafters raise is logged, and means that
    there are no drafts.
    """

    def __init__(
        self,
        client: DraftClient | None,
        policies: Policies,
        *,
        timeout_s: float,
        on_done: Callable[[LiveSequence], None],
        clock: Callable[[], float],
    ) -> None:
        """`on_done` is told of sequences that ended while a drafter was at work on them."""
        self.gamma = policies.gamma
        self._last_gamma = 0
        """The longest draft that was wanted in the last round."""
        self._policies = policies
        self._clock = clock
        self._drafting: Drafting | None = None
        if client is not None:
            self._drafting = Drafting(client, timeout_s=timeout_s, on_done=on_done)
            self._ahead = AheadDrafting(self._drafting, on_done=on_done)

    async def draft(self, sequences: Sequence[LiveSequence], *, num_beside: int) -> Speculated:
        """Drafts for a round of these sequences; for some or all of them there may be none.

        `num_beside`: see GammaController.
        """
        speculated = Speculated(reason=Reason.FAILED, drafts={})
        with _no_drafts_instead():
            speculated = await self._draft(sequences, num_beside=num_beside)
        return speculated

    async def _draft(self, sequences: Sequence[LiveSequence], *, num_beside: int) -> Speculated:
        decision = self.gamma.choose(self._candidates(sequences), num_beside=num_beside)
        wanted = [
            Wanted(sequence=sequence, gamma=gamma, stop_below=stop_below)
            for sequence, gamma, stop_below in zip(
                sequences, decision.gammas, decision.stop_below, strict=True
            )
            if gamma > 0
        ]
        self._last_gamma = max(decision.gammas, default=0)
        ready = self._drafting.take_ready(wanted) if self._drafting is not None else []
        if not ready or self._drafting is None:
            return Speculated(reason=decision.reason, drafts={})
        started = self._clock()
        is_after_overlap = any(of_sequence.sequence in self._ahead for of_sequence in ready)
        drafts = await self._ahead.take(ready) if is_after_overlap else {}
        missing = [w for w in ready if w.sequence.seq_id not in drafts]
        proposed = await self._drafting.propose(missing) if missing else NOTHING
        drafts |= proposed.drafts
        num_others = num_beside + len(sequences) - len(drafts)
        kept = self._keep(decision, sequences, drafts, num_others=num_others)
        longest = max((len(draft.tokens) for draft in drafts.values()), default=0)
        return Speculated(
            reason=decision.reason,
            drafts=kept,
            courses=tuple(_course(of_sequence, drafts, kept) for of_sequence in ready),
            num_drafted=len(missing),
            longest_draft=longest or max(of_sequence.gamma for of_sequence in ready),
            is_typical=proposed.is_typical and not is_after_overlap,
            is_after_overlap=is_after_overlap,
            draft_s=self._clock() - started,
            compute_s=proposed.compute_s,
        )

    def go_on(self, speculated: Speculated) -> bool:
        """Let drafters go on while these drafts are verified, if that pays; whether they do."""
        if not speculated.courses:
            return False
        does_go_on = False
        with _no_drafts_instead():
            does_go_on = self._policies.overlap.choose() and self._ahead.start(speculated.courses)
        return does_go_on

    def prepare(self, waiting: Sequence[LiveSequence]) -> None:
        """Let drafters begin with sequences that wait for a target that is busy, if that pays."""
        with _no_drafts_instead():
            self._prepare(waiting)

    def _prepare(self, waiting: Sequence[LiveSequence]) -> None:
        if not self._last_gamma or self._drafting is None or not self._policies.overlap.choose():
            return
        wanted = [
            Wanted(sequence=sequence, gamma=min(self._last_gamma, self._most_drafts(sequence)))
            for sequence in waiting
            if sequence not in self._ahead
        ]
        ready = self._drafting.take_ready(
            [of_sequence for of_sequence in wanted if of_sequence.gamma]
        )
        self._ahead.start([Course(sequence=w.sequence, gamma=w.gamma - 1) for w in ready])

    def foresee(self, sequences: Sequence[LiveSequence], *, num_beside: int) -> None:
        """Think about the next round of these sequences while this one is under way."""
        with _no_drafts_instead():
            self.gamma.prepare(self._candidates(sequences), num_beside=num_beside)

    def observe(self, observed: ObservedRound) -> None:
        """Learn from a round."""
        self.gamma.observe(observed)
        self._policies.overlap.observe(observed)

    def forget(self, sequence: LiveSequence) -> None:
        """A sequence has ended."""
        if self._drafting is not None:
            self._drafting.forget(sequence)
            self._ahead.forget(sequence)
        with _no_drafts_instead():
            self.gamma.forget(sequence.seq_id)

    def close(self) -> None:
        if self._drafting is not None:
            self._drafting.close()
            self._ahead.close()

    def _keep(
        self,
        decision: Decision,
        sequences: Sequence[LiveSequence],
        drafts: Drafts,
        *,
        num_others: int,
    ) -> Drafts:
        """Those that are worth verifying."""
        drafted = [
            Drafted(
                seq_id=sequence.seq_id,
                num_draft_tokens=len(draft.tokens),
                confidences=draft.confidences,
                is_sampled=sequence.is_sampled,
            )
            for sequence in sequences
            if (draft := drafts.get(sequence.seq_id)) is not None
        ]
        kept = self.gamma.keep(decision, drafted, num_others=num_others)
        return {
            of_sequence.seq_id: drafts[of_sequence.seq_id].first(num_kept)
            for of_sequence, num_kept in zip(drafted, kept, strict=True)
        }

    def _candidates(self, sequences: Sequence[LiveSequence]) -> list[Candidate]:
        return [
            Candidate(
                seq_id=sequence.seq_id,
                max_gamma=self._most_drafts(sequence),
                is_sampled=sequence.is_sampled,
                is_catching_up=self._drafting is not None
                and self._drafting.is_catching_up(sequence),
            )
            for sequence in sequences
        ]

    def _most_drafts(self, sequence: LiveSequence) -> int:
        """A round commits one token more than it accepts, so the last one needs no draft."""
        if self._drafting is None:
            return 0
        room = self._policies.max_drafted_len - len(sequence.tokens)
        return max(0, min(self._policies.max_gamma, sequence.num_remaining - 1, room))


@contextmanager
def _no_drafts_instead() -> Iterator[None]:
    """Log what is raised within, and go on."""
    try:
        yield
    except Exception:
        logger.exception("the draft side has failed; the round goes on without drafts")


def _course(wanted: Wanted, drafts: Drafts, kept: Drafts) -> Course:
    seq_id = wanted.sequence.seq_id
    return Course(
        sequence=wanted.sequence,
        gamma=wanted.gamma,
        stop_below=wanted.stop_below,
        foreseen=drafts.get(seq_id, NO_DRAFT),
        num_verified=len(kept.get(seq_id, NO_DRAFT).tokens),
    )
