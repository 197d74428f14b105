"""The draft side of the rounds: how far, by whom, and which of the drafts are verified."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from deployments.router.drafting.chain import DrafterChain, Turn
from deployments.router.drafting.early_exit import NextDrafts
from deployments.router.drafting.overlap import Overlap
from deployments.router.drafting.prefetch import PrefetchingDrafter, PrefetchRequest
from deployments.router.drafting.protocol import Drafter, DraftRequest, Drafts
from deployments.router.policy.gamma import (
    Candidate,
    Decision,
    Drafted,
    GammaController,
    Maker,
    ObservedRound,
    Reason,
)
from deployments.router.sequence import Sequence as LiveSequence
from workers.types import NO_DRAFTS, DraftTokens

logger = logging.getLogger(__name__)

Requests = dict[PrefetchingDrafter, list[DraftRequest]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """What decides about drafts."""

    gamma: GammaController
    overlap: Overlap
    max_gamma: int
    max_model_len: int
    """The longest sequence, drafts included, that the target can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculated:
    """The drafts of a round, and what they took."""

    reason: Reason
    drafts: Drafts
    """The drafts to verify."""
    prefetchable: dict[PrefetchingDrafter, list[PrefetchRequest]] = field(default_factory=dict)
    """What each remote drafter may go on with during the verification."""
    ahead: dict[str, NextDrafts] = field(default_factory=dict)
    """The drafts for the next round that the target is asked for, by sequence id."""
    decision: Decision | None = None
    """The decision by which the target is asked for them."""
    num_drafted: int = 0
    """Sequences that remote drafters were asked for in this round."""
    longest_draft: int = 0
    """Tokens of the longest draft of a remote drafter; see ObservedRound."""
    is_typical: bool = False
    """Whether the drafters did nothing but make these drafts."""
    is_after_overlap: bool = False
    """Whether some of them were made during the last verification."""
    draft_s: float = 0.0
    compute_s: float = 0.0
    further_s: float = 0.0


class Speculation:
    """Decides and fetches the drafts of every round of a loop.

    Nothing here can fail a round: whatever policies and drafters raise is logged, and means that
    there are no drafts.
    """

    def __init__(
        self, drafters: Sequence[Drafter], policies: Policies, *, clock: Callable[[], float]
    ) -> None:
        """The first of the drafters that has something to say speaks for a sequence."""
        self.gamma = policies.gamma
        self._policies = policies
        self._clock = clock
        self._chain = DrafterChain(drafters)
        self.drafters = tuple(drafter.source for drafter in drafters)
        """The names of the drafters."""
        self._last_gamma: int | None = None
        """The longest draft that was wanted in the last round that could have had one; None before
        the first."""

    async def draft(
        self, sequences: Sequence[LiveSequence], *, num_prefill_tokens: int
    ) -> Speculated:
        """Drafts for a round of these sequences; for some or all of them there may be none.

        `num_prefill_tokens`: see GammaController.
        """
        speculated = Speculated(reason=Reason.FAILED, drafts={})
        with _no_drafts_instead():
            speculated = await self._draft(sequences, num_prefill_tokens=num_prefill_tokens)
        return speculated

    async def _draft(
        self, sequences: Sequence[LiveSequence], *, num_prefill_tokens: int
    ) -> Speculated:
        turns = [self._turn_of(sequence) for sequence in sequences]
        if self._last_gamma is not None and all(map(_is_unread, turns)):
            return self._begin(turns, self._last_gamma)
        decision = self.gamma.choose(
            [_candidate(turn) for turn in turns], num_prefill_tokens=num_prefill_tokens
        )
        if any(turn.max_tokens for turn in turns):
            self._last_gamma = max(decision.gammas)
        in_hand, requests, ahead = self._take_turns(turns, decision)
        if not in_hand and not requests:
            return Speculated(reason=decision.reason, drafts={}, ahead=ahead, decision=decision)
        started = self._clock()
        proposed = await self._chain.propose(requests)
        drafts = in_hand | proposed.drafts
        earlier = {turn.sequence.seq_id: turn.decision for turn in turns if turn.decision}
        kept = self._select(decision, earlier, sequences, drafts)
        wanted = [request.k for asked in requests.values() for request in asked]
        made = [len(draft.tokens) for draft in proposed.drafts.values()]
        return Speculated(
            # of drafts that were decided about in the last round, what they bring counts there
            reason=next(iter(earlier.values()), decision).reason,
            drafts=kept,
            ahead=ahead,
            decision=decision,
            prefetchable={
                drafter: [_prefetchable(request, drafts, kept) for request in asked]
                for drafter, asked in requests.items()
            },
            num_drafted=proposed.num_asked,
            longest_draft=max(made, default=0) or max(wanted, default=0),
            is_typical=proposed.is_typical,
            is_after_overlap=proposed.is_after_prefetch,
            draft_s=self._clock() - started,
            compute_s=proposed.compute_s,
            further_s=proposed.further_s,
        )

    def _begin(self, turns: Sequence[Turn], last_gamma: int) -> Speculated:
        """The first round of sequences that nobody can draft for yet; drafters read them meanwhile
        if the last round wanted drafts.

        A plan for a new sequence alone would say little: it is going to share rounds with others.
        """
        if last_gamma:
            for turn in turns:
                self._chain.catch_up(turn)
        return Speculated(reason=Reason.FIRST, drafts={})

    def prefetch(self, speculated: Speculated) -> bool:
        """Let drafters go on while these drafts are verified, if that pays; returns whether they
        do."""
        if not speculated.prefetchable:
            return False
        num_prefetching = 0
        with _no_drafts_instead():
            if self._policies.overlap.choose():
                for drafter, requests in speculated.prefetchable.items():
                    num_prefetching += drafter.prefetch(requests)
        return num_prefetching > 0

    def prefetch_waiting(self, waiting: Sequence[LiveSequence]) -> None:
        """Let drafters begin with sequences that wait for a target that is busy, if that pays."""
        with _no_drafts_instead():
            if self._chain.remote and self._last_gamma and self._policies.overlap.choose():
                self._prefetch_waiting(waiting, self._last_gamma)

    def _prefetch_waiting(self, waiting: Sequence[LiveSequence], last_gamma: int) -> None:
        requests: dict[PrefetchingDrafter, list[PrefetchRequest]] = {}
        for turn in map(self._turn_of, waiting):
            self._chain.catch_up(turn)
            if turn.remote is not None and turn.sequence not in turn.remote:
                gamma = min(last_gamma, turn.max_tokens)
                # the next token is drafted too, though there is no verification before it
                request = PrefetchRequest(sequence=turn.sequence, gamma=gamma - 1)
                requests.setdefault(turn.remote, []).append(request)
        for drafter, asked in requests.items():
            drafter.prefetch(asked)

    def observe(self, observed: ObservedRound) -> None:
        """Learn from a round, and let drafters learn."""
        with _no_drafts_instead():
            self._chain.learn()
        self.gamma.observe(observed)
        sources = {outcome.source for outcome in observed.outcomes}
        if not sources or sources & {drafter.source for drafter in self._chain.remote}:
            self._policies.overlap.observe(observed)

    def keep(
        self, sequence: LiveSequence, next_drafts: DraftTokens, speculated: Speculated
    ) -> None:
        """Take the drafts for the next round that have come with the target's answer."""
        early_exit, decision = self._chain.early_exit, speculated.decision
        if early_exit is not None and decision is not None:
            with _no_drafts_instead():
                early_exit.keep(sequence, next_drafts, decision)

    def forget(self, sequence: LiveSequence) -> None:
        """A sequence has ended."""
        self._chain.forget(sequence)
        with _no_drafts_instead():
            self.gamma.forget(sequence.seq_id)

    async def close(self) -> None:
        """End what drafters do in the background."""
        await self._chain.close()

    def _turn_of(self, sequence: LiveSequence) -> Turn:
        """A round commits one token more than it accepts, so the last one needs no draft. There
        is none where masks are slow, as each draft would need a mask too."""
        room = self._policies.max_model_len - len(sequence.tokens)
        own = sequence.params.max_gamma
        limit = self._policies.max_gamma if own is None else min(own, self._policies.max_gamma)
        most = min(limit, sequence.num_remaining - 1, room)
        return self._chain.turn_of(sequence, 0 if sequence.has_slow_masks else most)

    def _take_turns(
        self, turns: Sequence[Turn], decision: Decision
    ) -> tuple[Drafts, Requests, dict[str, NextDrafts]]:
        """The drafts in hand, as far as they are wanted, and what to ask remote drafters and the
        target for."""
        in_hand: Drafts = {}
        requests: Requests = {}
        ahead: dict[str, NextDrafts] = {}
        for turn, gamma, stop_below in zip(
            turns, decision.gammas, decision.stop_below, strict=True
        ):
            if turn.is_ahead and turn.in_hand.tokens:  # what is decided is about the next round
                in_hand[turn.sequence.seq_id] = turn.in_hand
            if gamma == 0:
                continue
            self._chain.catch_up(turn)
            if turn.is_ahead:
                ahead[turn.sequence.seq_id] = NextDrafts(k=gamma, stop_below=stop_below)
            elif turn.in_hand.tokens:
                in_hand[turn.sequence.seq_id] = turn.in_hand.first(gamma)
            elif turn.remote is not None:
                request = DraftRequest(sequence=turn.sequence, k=gamma, stop_below=stop_below)
                requests.setdefault(turn.remote, []).append(request)
        return in_hand, requests, ahead

    def _select(
        self,
        decision: Decision,
        earlier: Mapping[str, Decision],
        sequences: Sequence[LiveSequence],
        drafts: Drafts,
    ) -> Drafts:
        """The drafts that are worth verifying, each by the decision that asked for them."""
        kept: Drafts = {}
        decisions = {id(each): each for each in (decision, *earlier.values())}
        for each in decisions.values():
            own = [s for s in sequences if earlier.get(s.seq_id, decision) is each]
            kept |= self._select_by(each, own, drafts)
        return kept

    def _select_by(
        self, decision: Decision, sequences: Sequence[LiveSequence], drafts: Drafts
    ) -> Drafts:
        drafted = [
            Drafted(
                seq_id=sequence.seq_id,
                num_draft_tokens=len(draft.tokens),
                confidences=draft.confidences,
                is_sampled=sequence.is_sampled,
                rule=sequence.rule,
                source=draft.source,
            )
            for sequence in sequences
            if (draft := drafts.get(sequence.seq_id)) is not None
        ]
        kept = self.gamma.select(decision, drafted)
        return {
            entry.seq_id: drafts[entry.seq_id].first(num_kept)
            for entry, num_kept in zip(drafted, kept, strict=True)
        }


@contextmanager
def _no_drafts_instead() -> Iterator[None]:
    """Log what is raised within, and go on."""
    try:
        yield
    except Exception:
        logger.exception("the draft side has failed; the round goes on without drafts")


def _is_unread(turn: Turn) -> bool:
    """Whether neither the target nor any drafter has read the sequence."""
    is_drafted = turn.in_hand.tokens or turn.remote is not None or turn.is_ahead
    return turn.sequence.target.cached_len == 0 and not is_drafted


def _maker_of(turn: Turn) -> Maker:
    if turn.is_ahead:
        return Maker.TARGET
    return Maker.NOBODY if turn.in_hand.tokens else Maker.DRAFTER


def _candidate(turn: Turn) -> Candidate:
    return Candidate(
        seq_id=turn.sequence.seq_id,
        max_gamma=turn.max_tokens,
        source=turn.source,
        is_sampled=turn.sequence.is_sampled,
        rule=turn.sequence.rule,
        maker=_maker_of(turn),
    )


def _prefetchable(request: DraftRequest, drafts: Drafts, kept: Drafts) -> PrefetchRequest:
    seq_id = request.sequence.seq_id
    return PrefetchRequest(
        sequence=request.sequence,
        gamma=request.k,
        stop_below=request.stop_below,
        predicted=drafts.get(seq_id, NO_DRAFTS),
        num_verified=len(kept.get(seq_id, NO_DRAFTS).tokens),
    )
