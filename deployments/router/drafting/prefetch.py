"""Prefetching: drafts for a round that has yet to begin, made while the target verifies.

The drafter goes on as if all its drafts were accepted, guesses the target's next token itself, and
drafts on from there. What the target commits then shows whether the guess was right; under coupled
noise it often is.
"""

import asyncio
import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from deployments.router.drafting.protocol import (
    DraftRequest,
    Drafts,
    Offer,
    Proposed,
    RemoteDrafter,
    sound,
)
from deployments.router.sequence import Sequence
from deployments.router.tasks import BackgroundTasks
from workers.types import NO_DRAFTS, DraftTokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchRequest:
    """A sequence in a round, and its drafter's drafts for this round."""

    sequence: Sequence
    gamma: int
    """Drafts to have in hand for the next round."""
    stop_below: float = 0.0
    """See ProposeRequest."""
    predicted: DraftTokens = NO_DRAFTS
    """All that was drafted for this round."""
    num_verified: int = 0
    """How many of the predicted tokens the target verifies in this round."""

    @property
    def num_lacking(self) -> int:
        """Tokens to draft yet, the target's next one included."""
        return self.gamma + self.num_verified + 1 - len(self.predicted.tokens)


@dataclass(slots=True, kw_only=True)
class _Prefetched:
    base_len: int
    """Committed tokens when it was asked for."""
    predicted: DraftTokens
    """The drafts from there on."""
    more: asyncio.Task[Proposed]
    """Brings the drafts that follow those."""

    def agrees(self, sequence: Sequence) -> bool:
        """Whether what was committed since is what was predicted, as far as that goes."""
        committed = tuple(sequence.tokens[self.base_len :])
        length = min(len(committed), len(self.predicted.tokens))
        return committed[:length] == self.predicted.tokens[:length]


class PrefetchingDrafter:
    """A remote drafter that can be let go on during a verification.

    Prefetched drafts that come late or prove wrong are asked for again. If the drafter raises, that
    is logged and there are no drafts.
    """

    def __init__(self, drafter: RemoteDrafter) -> None:
        self._drafter = drafter
        self._prefetched: dict[str, _Prefetched] = {}
        self._tasks = BackgroundTasks()

    @property
    def source(self) -> str:
        return self._drafter.source

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether drafts of it are in hand, or on their way."""
        return sequence.seq_id in self._prefetched

    def offer(self, sequence: Sequence, max_tokens: int) -> Offer | None:
        return self._drafter.offer(sequence, max_tokens)

    def catch_up(self, sequence: Sequence) -> None:
        self._drafter.catch_up(sequence)

    def prefetch(self, requests: SequenceOf[PrefetchRequest]) -> bool:
        """Let the drafter go on with these sequences; returns at once, whether it does."""
        lacking = [
            request
            for request in requests
            if request.num_lacking > 0 and request.sequence.num_remaining > request.num_verified + 1
        ]
        if not lacking:
            return False
        more = self._tasks.spawn(
            self._ask(
                [
                    DraftRequest(
                        sequence=request.sequence,
                        k=request.num_lacking,
                        stop_below=request.stop_below,
                        assumed=request.predicted.tokens,
                    )
                    for request in lacking
                ]
            )
        )
        for request in lacking:
            self._prefetched[request.sequence.seq_id] = _Prefetched(
                base_len=len(request.sequence.tokens), predicted=request.predicted, more=more
            )
        return True

    async def propose(self, requests: SequenceOf[DraftRequest]) -> Proposed:
        """Drafts as its drafter makes them; what was prefetched for these sequences and proved
        right comes first."""
        is_after_prefetch = any(request.sequence in self for request in requests)
        drafts = await self._take(requests)
        missing = [request for request in requests if request.sequence.seq_id not in drafts]
        proposed = await self._ask(missing) if missing else Proposed()
        return replace(
            proposed,
            drafts={**drafts, **proposed.drafts},
            is_typical=proposed.is_typical and not is_after_prefetch,
            is_after_prefetch=is_after_prefetch,
        )

    def forget(self, sequence: Sequence) -> None:
        self._prefetched.pop(sequence.seq_id, None)
        self._drafter.forget(sequence)

    async def close(self) -> None:
        await self._tasks.close()
        await self._drafter.close()

    async def _ask(self, requests: SequenceOf[DraftRequest]) -> Proposed:
        """What the drafter brings, as far as it may be used."""
        wanted = {request.sequence.seq_id: request.k for request in requests}
        try:
            proposed = await self._drafter.propose(requests)
            drafts = {
                seq_id: sound(drafts, source=self.source, max_tokens=wanted[seq_id])
                for seq_id, drafts in proposed.drafts.items()
            }
        except Exception:
            logger.exception("drafter %s has failed; the round goes on without", self.source)
            return Proposed(num_asked=len(requests))
        return replace(proposed, drafts=drafts)

    async def _take(self, requests: SequenceOf[DraftRequest]) -> Drafts:
        """Drafts in hand for these sequences; waits for some that may be right."""
        drafts = {}
        for request in requests:
            sequence = request.sequence
            prefetched = self._prefetched.pop(sequence.seq_id, None)
            if prefetched is None or not prefetched.agrees(sequence):
                continue
            proposed = await asyncio.shield(prefetched.more)
            prefetched.predicted += proposed.drafts.get(sequence.seq_id, NO_DRAFTS)
            num_committed = len(sequence.tokens) - prefetched.base_len
            if prefetched.agrees(sequence) and len(prefetched.predicted.tokens) > num_committed:
                drafts[sequence.seq_id] = prefetched.predicted.after(num_committed).first(request.k)
        return drafts
