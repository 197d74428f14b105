"""The round loop: draft, verify, commit, for all live sequences at once.

Every sequence is either waiting or in one round. Sequences that share a target replica go through
rounds together, one round at a time, so that one verify call carries them all. A sequence whose
cache is missing (a new one, or one whose target was lost) has a round of its own, so that a long
prefill never holds up the others, and so has one whose grammar takes long over each mask.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deployments.router.digest import Digest
from deployments.router.drafting.protocol import Drafter
from deployments.router.live import Live, ended_by_defects
from deployments.router.policy.gamma import GammaController, Outcome
from deployments.router.round import (
    RoundObserver,
    outcome,
    record_round,
    verify_request,
)
from deployments.router.sequence import Sequence as LiveSequence
from deployments.router.speculation import Policies, Speculated, Speculation
from deployments.router.tasks import BackgroundTasks
from deployments.transport.worker_client import WorkerClient
from workers.errors import WorkerLostError
from workers.types import NO_DRAFTS, Reply, VerifyRequest, VerifyResult, is_prefill_len

logger = logging.getLogger(__name__)

TargetClient = WorkerClient[VerifyRequest, VerifyResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """Deadlines, all in seconds."""

    verify_timeout_s: float = 120.0
    """How long a target may be silent before its sequences move on."""
    recovery_timeout_s: float = 60.0
    """How long a sequence waits for some target to answer before it fails."""


class RoundLoop:
    """Owns the live sequences of one router."""

    def __init__(
        self,
        *,
        targets: TargetClient,
        drafters: Sequence[Drafter],
        policies: Policies,
        observer: RoundObserver,
        options: LoopOptions,
        clock: Callable[[], float],
    ) -> None:
        self._targets = targets
        self._options = options
        self._clock = clock
        self._speculation = Speculation(drafters, policies, clock=clock)
        self._digest = Digest(self._speculation.observe, observer)
        self._live: dict[str, Live] = {}
        self._busy_targets: set[str] = set()
        self._tasks = BackgroundTasks()
        self._is_closed = False

    @property
    def drafters(self) -> tuple[str, ...]:
        """The names of what drafts here."""
        return self._speculation.drafters

    @property
    def num_live(self) -> int:
        return len(self._live)

    def use_gamma(self, gamma: GammaController) -> None:
        """Go on with another controller."""
        self._digest.run()  # rounds that were not its own
        self._speculation.gamma = gamma

    def add(self, sequence: LiveSequence) -> None:
        """Take a sequence on; its stream ends by itself, or by `cancel`."""
        live = self._live[sequence.seq_id] = Live(sequence)
        self._digest.observe_live(self.num_live)
        self._start_own_round(live)

    def cancel(self, sequence: LiveSequence) -> None:
        """Nobody waits for the text any more; everything it holds is freed."""
        live = self._live.get(sequence.seq_id)
        if live is None:
            if not sequence.is_done:  # suspended, while a drafter may still have been catching up
                sequence.is_cancelled = True
                self._speculation.forget(sequence)
            return
        sequence.is_cancelled = True
        if not live.in_round:
            self._remove(live)
        elif live.own_round is not None:
            live.own_round.cancel()  # it may be a long prefill; its end releases

    async def suspend(self, sequence: LiveSequence) -> None:
        """Take a sequence out of the rounds and free what it holds; `add` lets it go on.

        Returns when the round that it is in has ended, with which its text may have ended too.
        """
        live = self._live.get(sequence.seq_id)
        if live is None:
            return
        live.is_leaving = True
        if not live.in_round:
            self._remove(live)
        await live.has_left.wait()
        sequence.target.forget()

    async def close(self) -> None:
        """Stop all rounds; the sequences are lost."""
        self._is_closed = True
        await self._tasks.close()
        await self._speculation.close()

    def _start_rounds(self, *, free_target: str | None = None) -> list[Live]:
        """Start whatever can start: called whenever a sequence becomes ready.

        Returns those of `free_target` that are ready: their round is the caller's to run.
        """
        if self._is_closed:
            return []
        now = self._clock()
        groups: dict[str, list[Live]] = {}
        waiting: list[LiveSequence] = []
        for live in self._live.values():
            if live.in_round or live.not_before > now:
                continue
            target = live.sequence.target
            num_missing = len(live.sequence.tokens) - target.cached_len
            is_uncached = target.replica_id is None or target.cached_len == 0
            if is_uncached or is_prefill_len(num_missing) or live.sequence.has_slow_masks:
                self._start_own_round(live)
            elif target.replica_id in self._busy_targets:
                waiting.append(live.sequence)
            elif target.replica_id is not None:
                live.in_round = True
                groups.setdefault(target.replica_id, []).append(live)
        if waiting:
            self._speculation.prefetch_waiting(waiting)
        self._busy_targets.update(groups)
        to_run = groups.pop(free_target, []) if free_target is not None else []
        for replica_id, members in groups.items():
            self._tasks.spawn(self._run_rounds(replica_id, members))
        return to_run

    def _start_own_round(self, live: Live) -> None:
        """Start a round of one; of sequences that are suspected enough, only one at a time."""
        must_wait = live.suspicion.is_enough and any(
            other.in_round and other.suspicion.is_enough for other in self._live.values()
        )
        if must_wait or self._is_closed:
            return
        live.in_round = True
        live.own_round = self._tasks.spawn(
            self._run_round(
                live.sequence.target.replica_id, [live], num_prefill_tokens=0, started=self._clock()
            )
        )
        # not within the task: one that is cancelled before it starts never runs
        live.own_round.add_done_callback(lambda _: self._end_own_round(live))

    def _end_own_round(self, live: Live) -> None:
        live.own_round = None
        self._leave([live])
        self._start_rounds()

    async def _run_rounds(self, replica_id: str, members: list[Live]) -> None:
        """Run round after round of the sequences that share a target.

        All in one task: the next round's request is sent before the streams have their turn, which
        hand out the texts of the last one while the workers compute.
        """
        num_prefill_tokens, started = 0, self._clock()
        while members:
            try:
                num_prefill_tokens = await self._run_round(
                    replica_id, members, num_prefill_tokens=num_prefill_tokens, started=started
                )
            finally:
                started = self._clock()
                self._leave(members)
                self._busy_targets.discard(replica_id)
                members = self._start_rounds(free_target=replica_id)

    def _leave(self, members: list[Live]) -> None:
        """Take sequences out of their round; remove those that have ended or leave."""
        for live in members:
            live.in_round = False
            if live.sequence.is_done or live.is_leaving:
                self._remove(live)

    def _remove(self, live: Live) -> None:
        """Let a sequence go that has ended or leaves, and free what it holds."""
        live.has_left.set()
        if self._live.pop(live.sequence.seq_id, None) is not None:
            self._release(live.sequence)
            self._digest.observe_live(self.num_live)  # after its last round

    async def _run_round(
        self,
        replica_id: str | None,
        members: list[Live],
        *,
        num_prefill_tokens: int,
        started: float,
    ) -> int:
        """Draft, verify and commit, while the target also has so many tokens of prompts to run.

        The round has `started` when the one before ended. Returns how many tokens of prompts there
        are beside the next round.
        """
        num_prefill_next = 0
        # runs as soon as this round waits for a drafter, or for the target where none is asked
        asyncio.get_running_loop().call_soon(self._digest.run)
        with ended_by_defects(members):
            speculated = await self._speculation.draft(
                [live.sequence for live in members], num_prefill_tokens=num_prefill_tokens
            )
            members = [live for live in members if not live.sequence.is_done]
            if not members:
                return num_prefill_tokens
            batch = [verify_request(live.sequence, speculated) for live in members]
            verify_started = self._clock()
            is_overlapped = self._speculation.prefetch(speculated)
            try:
                if replica_id is None and members[0].suspicion.is_enough:
                    replica_id = await self._targets.find()  # if that ends, it is by this sequence
                reply = await self._targets.call(
                    replica_id, batch, timeout_s=self._options.verify_timeout_s
                )
            except Exception as error:
                self._lose_target(members, error)
                return 0
            verify_s = self._clock() - verify_started
            outcomes, num_committed = self._commit(members, batch, reply, speculated)
            record = record_round(
                speculated,
                batch,
                reply,
                outcomes,
                num_committed=num_committed,
                is_beside_prompts=num_prefill_tokens > 0,
                is_overlapped=is_overlapped,
                verify_s=verify_s,
                total_s=self._clock() - started,
            )
            self._digest.add(record)
            num_prefill_next = reply.num_prefill_tokens
        return num_prefill_next

    def _commit(
        self,
        members: Sequence[Live],
        batch: Sequence[VerifyRequest],
        reply: Reply[VerifyResult],
        speculated: Speculated,
    ) -> tuple[tuple[Outcome, ...], int]:
        """What became of the drafts, and how many tokens were committed."""
        outcomes, num_committed = [], 0
        for live, request, result in zip(members, batch, reply.results, strict=True):
            sequence = live.sequence
            sequence.target.replica_id = reply.replica_id
            with live.ended_by_errors():
                draft = speculated.drafts.get(request.seq_id, NO_DRAFTS)
                num_new = sequence.commit(result, source=draft.source)
                num_committed += num_new
                live.note_progress(num_new)
                self._speculation.keep(sequence, result.next_drafts, speculated)
                if result.num_tested:  # of drafts that there was no room for nothing is known
                    outcomes.append(outcome(sequence, draft, result, num_committed=num_new))
        return tuple(outcomes), num_committed

    def _lose_target(self, members: Sequence[Live], error: Exception) -> None:
        """No answer came: the sequences ask another target, some by themselves, or have failed."""
        is_defect = not isinstance(error, WorkerLostError)
        logger.warning(
            "%d sequences lost their target: %s", len(members), error, exc_info=is_defect
        )
        for live in members:
            self._release_target(live.sequence)
            live.lose_target(error)
            pause_s = live.try_again(
                error, now=self._clock(), timeout_s=self._options.recovery_timeout_s
            )
            if pause_s is not None:
                # a timer may fire a little early
                asyncio.get_running_loop().call_later(pause_s + 0.01, self._start_rounds)

    def _release(self, sequence: LiveSequence) -> None:
        self._digest.run()  # what was learnt of the sequence is forgotten next
        self._speculation.forget(sequence)
        self._release_target(sequence)

    def _release_target(self, sequence: LiveSequence) -> None:
        replica_id = sequence.target.replica_id
        if replica_id is not None:
            self._targets.release(replica_id, [sequence.seq_id])
