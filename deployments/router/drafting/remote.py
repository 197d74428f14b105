"""The draft side of a round: who has drafts to offer, asked with a deadline."""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from deployments.router.sequence import Sequence as LiveSequence
from deployments.transport.worker_client import WorkerClient
from workers.errors import WorkerLostError
from workers.types import ProposeRequest, ProposeResult

logger = logging.getLogger(__name__)

# Tokens committed since a drafter was last asked. It has its own drafts of these, of which a round
# can commit up to 64 and one more; what it lacks beyond them it runs within the round.
MAX_BEHIND = 96
# Catching up is nobody's wait, so it may take as long as a long prompt takes.
CATCH_UP_TIMEOUT_S = 60.0

DraftClient = WorkerClient[ProposeRequest, ProposeResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Drafts to ask for; see ProposeRequest."""

    sequence: LiveSequence
    gamma: int
    stop_below: float = 0.0
    assumed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Tokens that a drafter foresees after the committed ones."""

    tokens: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    """One per token, or none."""
    source: str = "model"
    """Which drafter they are of."""

    def first(self, num_tokens: int) -> "Draft":
        if num_tokens >= len(self.tokens):
            return self
        return Draft(tokens=self.tokens[:num_tokens], confidences=self.confidences[:num_tokens])

    def after(self, num_tokens: int) -> "Draft":
        """What is left without the first tokens."""
        return Draft(tokens=self.tokens[num_tokens:], confidences=self.confidences[num_tokens:])

    def __add__(self, other: "Draft") -> "Draft":
        return Draft(
            tokens=self.tokens + other.tokens, confidences=self.confidences + other.confidences
        )


NO_DRAFT = Draft()
Drafts = dict[str, Draft]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """What drafters brought."""

    drafts: Drafts
    """By sequence id."""
    compute_s: float
    """What a drafter spent in steps, of several the one that took longest."""
    is_typical: bool
    """Whether they did nothing but draft."""


NOTHING = Proposed(drafts={}, compute_s=0.0, is_typical=False)


class Drafting:
    """Asks drafters for drafts, and lets them catch up when they are behind.

    Nothing here can fail a round: a drafter that is late, lost, behind, or does not keep to what
    was asked means no drafts.
    """

    def __init__(
        self,
        client: DraftClient,
        *,
        timeout_s: float,
        on_done: Callable[[LiveSequence], None],
    ) -> None:
        """`on_done` is told of sequences that ended while a drafter was catching up."""
        self._client = client
        self._timeout_s = timeout_s
        self._on_done = on_done
        self._catching_up: dict[str, asyncio.Task[None]] = {}
        self._given_up: set[str] = set()
        """Sequences that a drafter could not go on with: another would fail alike."""
        self._releasing: set[asyncio.Task[None]] = set()

    def take_ready(self, wanted: Sequence[Wanted]) -> list[Wanted]:
        """Those whose drafter has their tokens; the others' drafters start to catch up."""
        ready = []
        for of_sequence in wanted:
            if of_sequence.sequence.seq_id in self._given_up:
                continue
            if self._is_ready(of_sequence.sequence):
                ready.append(of_sequence)
            else:
                self._catch_up(of_sequence.sequence)
        return ready

    async def propose(self, ready: Sequence[Wanted]) -> Proposed:
        """At most as many drafts as asked for; fewer or none are fine."""
        by_replica = sorted(ready, key=_replica_id)
        calls = [
            self._propose_on(replica_id, list(group))
            for replica_id, group in groupby(by_replica, key=_replica_id)
        ]
        # a task of its own would start a turn of the event loop later
        proposed = [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)
        drafts: Drafts = {}
        for of_replica in proposed:
            drafts.update(of_replica.drafts)
        return Proposed(
            drafts=drafts,
            compute_s=max(of_replica.compute_s for of_replica in proposed),
            is_typical=all(of_replica.is_typical for of_replica in proposed),
        )

    def is_catching_up(self, sequence: LiveSequence) -> bool:
        return sequence.seq_id in self._catching_up

    def forget(self, sequence: LiveSequence) -> None:
        """A sequence has ended."""
        self._given_up.discard(sequence.seq_id)

    def close(self) -> None:
        for task in (*self._catching_up.values(), *self._releasing):
            task.cancel()

    def _is_ready(self, sequence: LiveSequence) -> bool:
        """Whether its drafter is near enough to catch up within a round."""
        placement = sequence.draft
        return (
            placement.replica_id is not None
            and placement.cached_len > 0
            and not self.is_catching_up(sequence)
            and len(sequence.tokens) - placement.cached_len <= MAX_BEHIND
        )

    async def _propose_on(self, replica_id: str, wanted: Sequence[Wanted]) -> Proposed:
        batch = [_request(of_sequence) for of_sequence in wanted]
        try:
            reply = await self._client.call(replica_id, batch, timeout_s=self._timeout_s)
            drafts = {
                request.seq_id: _draft_of(result, request)
                for of_sequence, request, result in zip(wanted, batch, reply.results, strict=True)
                if self._note(of_sequence.sequence, request, result, reply.replica_id)
            }
        except Exception as error:
            _log("a round goes on without drafts", error)
            self._give_back(replica_id, [of_sequence.sequence for of_sequence in wanted])
            return NOTHING
        num_own = sum(
            len(request.new_tokens) + len(request.assumed_tokens) + request.k for request in batch
        )
        return Proposed(
            drafts=drafts,
            compute_s=reply.compute_s,
            is_typical=reply.num_steps == 1 and reply.num_tokens <= num_own,
        )

    def _catch_up(self, sequence: LiveSequence) -> None:
        if sequence.seq_id not in self._catching_up:
            task = asyncio.create_task(self._run_catch_up(sequence))
            self._catching_up[sequence.seq_id] = task

    async def _run_catch_up(self, sequence: LiveSequence) -> None:
        request = _request(Wanted(sequence=sequence, gamma=0))
        try:
            reply = await self._client.call(
                sequence.draft.replica_id, [request], timeout_s=CATCH_UP_TIMEOUT_S
            )
            self._note(sequence, request, reply.results[0], reply.replica_id)
        except Exception as error:
            _log("a drafter did not catch up", error)
            self._give_back(sequence.draft.replica_id, [sequence])
        finally:
            del self._catching_up[sequence.seq_id]
            if sequence.is_done:
                self._on_done(sequence)

    def _give_back(self, replica_id: str | None, sequences: Sequence[LiveSequence]) -> None:
        """Have a replica, or all if it is not known which, free sequences after a failure."""
        for sequence in sequences:
            sequence.draft.forget()
        seq_ids = [sequence.seq_id for sequence in sequences]
        task = asyncio.create_task(release_on(self._client, replica_id, seq_ids))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    def _note(
        self,
        sequence: LiveSequence,
        request: ProposeRequest,
        result: ProposeResult,
        replica_id: str,
    ) -> bool:
        """Remember what the drafter has now; whether it answered the question."""
        sequence.draft.replica_id = replica_id
        if result.error:
            logger.warning("%s goes on without drafts: %s", sequence.seq_id, result.error)
            self._give_back(replica_id, [sequence])
            if not sequence.is_done:
                self._given_up.add(sequence.seq_id)
            return False
        if result.needs_tokens_from is not None:
            sequence.draft.cached_len = max(0, result.needs_tokens_from)
            return False
        if result.is_released:
            return False
        sequence.draft.cached_len = request.base_len + len(request.new_tokens)
        return True


def _draft_of(result: ProposeResult, request: ProposeRequest) -> Draft:
    """What a drafter brought, as far as it may be used: k tokens, and confidences above 0."""
    tokens = result.draft_tokens[: request.k]
    confidences = result.confidences[: len(tokens)]
    are_sound = len(confidences) == len(tokens) and all(
        math.isfinite(confidence) and 0.0 <= confidence <= 1.0 for confidence in confidences
    )
    return Draft(tokens=tokens, confidences=confidences if are_sound else ())


async def release_on(
    client: WorkerClient[Any, Any], replica_id: str | None, seq_ids: Sequence[str]
) -> None:
    """Free sequences on a replica, or on all; that it cannot be told is logged."""
    try:
        await client.release(replica_id, seq_ids)
    except WorkerLostError as error:
        # a replica that is gone holds nothing; one that lives forgets idle sequences by itself
        logger.info("%s not released on %s: %s", seq_ids, replica_id or "any", error)


def _log(what: str, error: Exception) -> None:
    """A lost worker is nothing unusual; of anything else the log says where it comes from."""
    logger.warning("%s: %s", what, error, exc_info=not isinstance(error, WorkerLostError))


def _replica_id(wanted: Wanted) -> str:
    return wanted.sequence.draft.replica_id or ""


def _request(wanted: Wanted) -> ProposeRequest:
    sequence = wanted.sequence
    # the newest token goes along even if it was sent before, in a round that then failed
    base_len = min(sequence.draft.cached_len, len(sequence.tokens) - 1)
    return ProposeRequest(
        seq_id=sequence.seq_id,
        base_len=base_len,
        new_tokens=tuple(sequence.tokens[base_len:]),
        assumed_tokens=wanted.assumed,
        k=wanted.gamma,
        stop_below=wanted.stop_below,
        prompt_len=sequence.prompt_len,
        sampling=sequence.params.sampling,
        seed=sequence.params.seed,
        cache_salt=sequence.params.cache_salt,
    )
