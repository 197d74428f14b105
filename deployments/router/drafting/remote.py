"""A drafter behind a WorkerClient: the replicas of a draft model.

Where each sequence's soft state lies, what is cached there, catching up, deadlines, releases and
giving up are this module's affair. A drafter that is late, lost, behind, or does not keep to what
was asked means no drafts.
"""

import asyncio
import logging
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

from deployments.router.drafting.protocol import DraftRequest, Offer, Proposed
from deployments.router.sequence import Placement, Sequence
from deployments.router.tasks import BackgroundTasks
from deployments.transport.worker_client import WorkerClient
from workers.errors import WorkerLostError
from workers.sampling_params import AS_BEFORE
from workers.types import DraftTokens, ProposeRequest, ProposeResult

logger = logging.getLogger(__name__)

SOURCE = "model"
MAX_BEHIND = 96
"""Tokens committed since a drafter was last asked. It has its own drafts of these, of which a round
can commit up to 64 and one more; what it lacks beyond them it runs within the round."""
CATCH_UP_TIMEOUT_S = 60.0
"""Catching up is nobody's wait, so it may take as long as a long prompt takes."""

DraftClient = WorkerClient[ProposeRequest, ProposeResult]


@dataclass(slots=True, kw_only=True, eq=False)
class _Known:
    """A sequence that some replica has been asked about."""

    placement: Placement = field(default_factory=Placement)
    num_calls: int = 0
    """The number of calls under way that carry the sequence."""
    is_catching_up: bool = False
    has_given_up: bool = False
    """Whether a replica could not go on with the sequence; another would fail alike."""


class PooledDrafter:
    """Asks the replicas of a draft model for drafts, and lets them catch up."""

    source = SOURCE

    def __init__(self, client: DraftClient, *, timeout_s: float, max_model_len: int) -> None:
        """A round waits `timeout_s` for drafts; no sequence beyond `max_model_len` is drafted."""
        self._client = client
        self._timeout_s = timeout_s
        self._max_model_len = max_model_len
        self._known: dict[str, _Known] = {}
        self._tasks = BackgroundTasks()

    @property
    def is_idle(self) -> bool:
        """Whether no sequence is known and nothing runs in the background."""
        return not self._known and not self._tasks

    def offer(self, sequence: Sequence, max_tokens: int) -> Offer | None:
        room = self._max_model_len - len(sequence.tokens)
        known = self._known.get(sequence.seq_id)
        if room <= 0 or (known is not None and known.has_given_up):
            return None
        return Offer(
            max_tokens=min(max_tokens, room),
            is_ready=known is not None and _is_ready(known, sequence),
        )

    def catch_up(self, sequence: Sequence) -> None:
        if sequence.is_done:
            return
        known = self._know(sequence)
        if not known.is_catching_up:
            known.is_catching_up = True
            self._tasks.spawn(self._run_catch_up(sequence, known))

    async def propose(self, requests: SequenceOf[DraftRequest]) -> Proposed:
        running = [request for request in requests if not request.sequence.is_done]
        calls = [
            self._propose_on(replica_id, list(group))
            for replica_id, group in groupby(
                sorted(running, key=self._replica_id), key=self._replica_id
            )
        ]
        # a task of its own would start a turn of the event loop later
        parts = [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)
        return Proposed.together(parts)

    def forget(self, sequence: Sequence) -> None:
        """Free it where it lies; what a call under way leaves there is freed at its end."""
        known = self._known.get(sequence.seq_id)
        if known is None:
            return
        self._release(sequence.seq_id, known.placement.replica_id)
        if known.num_calls == 0:
            del self._known[sequence.seq_id]

    async def close(self) -> None:
        await self._tasks.close()

    def _know(self, sequence: Sequence) -> _Known:
        return self._known.setdefault(sequence.seq_id, _Known())

    def _replica_id(self, request: DraftRequest) -> str:
        return self._know(request.sequence).placement.replica_id or ""

    async def _propose_on(self, replica_id: str, requests: SequenceOf[DraftRequest]) -> Proposed:
        sequences = [request.sequence for request in requests]
        batch = [self._propose_request(request) for request in requests]
        with self._calling(sequences):
            try:
                reply = await self._client.call(replica_id, batch, timeout_s=self._timeout_s)
                replica_id = reply.replica_id
                drafts = {
                    asked.seq_id: DraftTokens(
                        tokens=result.draft_tokens,
                        confidences=result.confidences,
                        law=result.law,
                    )
                    for sequence, asked, result in zip(sequences, batch, reply.results, strict=True)
                    if self._note(sequence, asked, result, replica_id)
                }
            except Exception as error:
                _log("a round goes on without drafts", error)
                self._give_back(replica_id, sequences)
                return Proposed(num_asked=len(batch))
        # what a round with these drafts commits is new to the next; more was written without drafts
        num_own = sum(min(len(r.new_tokens), r.k + 1) + len(r.assumed_tokens) + r.k for r in batch)
        return Proposed(
            drafts=drafts,
            num_asked=len(batch),
            compute_s=reply.compute_s,
            further_s=max((result.further_s for result in reply.results), default=0.0),
            is_typical=reply.num_steps == 1 and reply.num_tokens <= num_own,
        )

    async def _run_catch_up(self, sequence: Sequence, known: _Known) -> None:
        if sequence.is_done:  # before this task had its first turn
            return
        request = self._propose_request(DraftRequest(sequence=sequence, k=0))
        replica_id = known.placement.replica_id
        with self._calling([sequence]):
            try:
                reply = await self._client.call(replica_id, [request], timeout_s=CATCH_UP_TIMEOUT_S)
                replica_id = reply.replica_id
                self._note(sequence, request, reply.results[0], replica_id)
            except Exception as error:
                _log("a drafter did not catch up", error)
                self._give_back(replica_id, [sequence])
            finally:
                known.is_catching_up = False

    @contextmanager
    def _calling(self, sequences: SequenceOf[Sequence]) -> Iterator[None]:
        """A call carries these sequences; those that have ended by its end are freed then."""
        for sequence in sequences:
            self._know(sequence).num_calls += 1
        try:
            yield
        finally:
            for sequence in sequences:
                known = self._known[sequence.seq_id]
                known.num_calls -= 1
                if sequence.is_done and known.num_calls == 0:
                    del self._known[sequence.seq_id]
                    self._release(sequence.seq_id, known.placement.replica_id)

    def _release(self, seq_id: str, replica_id: str | None) -> None:
        if replica_id is not None:
            self._client.release(replica_id, [seq_id])

    def _give_back(self, replica_id: str | None, sequences: SequenceOf[Sequence]) -> None:
        """Have a replica free sequences after a failure; a call that failed has done so itself."""
        for sequence in sequences:
            self._know(sequence).placement.forget()
            self._release(sequence.seq_id, replica_id)

    def _note(
        self, sequence: Sequence, request: ProposeRequest, result: ProposeResult, replica_id: str
    ) -> bool:
        """Remember what the drafter has now; returns whether it answered the question."""
        known = self._know(sequence)
        known.placement.replica_id = replica_id
        if result.error:
            logger.warning("%s goes on without drafts: %s", sequence.seq_id, result.error)
            self._give_back(replica_id, [sequence])
            known.has_given_up = True
            return False
        if result.needs_tokens_from is not None:
            known.placement.cached_len = max(0, result.needs_tokens_from)
            return False
        if result.is_released:
            return False
        known.placement.cached_len = request.base_len + len(request.new_tokens)
        return True

    def _propose_request(self, request: DraftRequest) -> ProposeRequest:
        sequence = request.sequence
        # the newest token goes along even if it was sent before, in a round that then failed
        cached_len = self._know(sequence).placement.cached_len
        base_len = min(cached_len, len(sequence.tokens) - 1)
        return ProposeRequest(
            seq_id=sequence.seq_id,
            base_len=base_len,
            new_tokens=tuple(sequence.tokens[base_len:]),
            assumed_tokens=request.assumed,
            k=request.k,
            stop_below=request.stop_below,
            prompt_len=sequence.prompt_len,
            sampling=sequence.params.sampling if base_len == 0 else AS_BEFORE,
            seed=sequence.params.seed,
            verification=sequence.params.verification,
            cache_salt=sequence.params.cache_salt,
            tenant=sequence.params.tenant.name,
            weight=sequence.params.tenant.weight,
        )


def _is_ready(known: _Known, sequence: Sequence) -> bool:
    """Whether its drafter is near enough to catch up within a round."""
    placement = known.placement
    return (
        placement.replica_id is not None
        and placement.cached_len > 0
        and not known.is_catching_up
        and len(sequence.tokens) - placement.cached_len <= MAX_BEHIND
    )


def _log(what: str, error: Exception) -> None:
    """A lost worker is nothing unusual; of anything else the log says where it comes from."""
    logger.warning("%s: %s", what, error, exc_info=not isinstance(error, WorkerLostError))
