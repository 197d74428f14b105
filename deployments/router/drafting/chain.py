"""The drafters of an app in their order, and which of them drafts for a sequence in a round."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, replace

from deployments.router.drafting import early_exit, lookup, remote, suffix
from deployments.router.drafting.early_exit import EarlyExit
from deployments.router.drafting.forced import ForcedTokens
from deployments.router.drafting.lookup import PromptLookup
from deployments.router.drafting.predicted import PredictedOutput
from deployments.router.drafting.prefetch import PrefetchingDrafter
from deployments.router.drafting.protocol import (
    Drafter,
    DraftRequest,
    Learner,
    LocalDrafter,
    Proposed,
    RemoteDrafter,
    sound,
)
from deployments.router.drafting.remote import PooledDrafter
from deployments.router.drafting.suffix import SuffixDrafter
from deployments.router.policy.gamma import Decision
from deployments.router.sequence import Sequence
from workers.grammar_compiler import GrammarCompiler
from workers.types import NO_DRAFTS, DraftTokens

logger = logging.getLogger(__name__)

LOCAL_DRAFTERS: dict[str, Callable[..., LocalDrafter]] = {
    lookup.SOURCE: PromptLookup,
    suffix.SOURCE: SuffixDrafter,
}
"""The local drafters by name. `is_last` tells them whether another is asked after them."""


def make_drafters(
    names: SequenceOf[str], pool: PooledDrafter | None, grammars: GrammarCompiler | None = None
) -> list[Drafter]:
    """The drafters of these names, of which "model" is `pool`, and "early_exit" the target's own.

    Before them, what a client predicts is drafted, and if there are any, what `grammars` force.
    """
    drafters: list[Drafter] = [PredictedOutput(is_last=not names)]
    if names and grammars is not None:
        drafters.append(ForcedTokens(grammars))
    for index, name in enumerate(names):
        if name == remote.SOURCE:
            assert pool is not None, "a draft model needs replicas"
            drafters.append(pool)
        elif name == early_exit.SOURCE:
            drafters.append(EarlyExit())
        else:
            drafters.append(LOCAL_DRAFTERS[name](is_last=index == len(names) - 1))
    return drafters


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The drafter that drafts for a sequence in a round; none where no drafter has or will have
    drafts."""

    sequence: Sequence
    source: str = ""
    max_tokens: int = 0
    """The most drafts that can be had."""
    in_hand: DraftTokens = NO_DRAFTS
    """The drafts of a local drafter."""
    is_ahead: bool = False
    """Whether `max_tokens` is about drafts that the target may be asked to make for the next
    round."""
    decision: Decision | None = None
    """The decision by which drafts in hand were asked for in the last round, where the target made
    them."""
    remote: PrefetchingDrafter | None = None
    """The remote drafter that is ready to be asked."""
    behind: tuple[PrefetchingDrafter, ...] = ()
    """Remote drafters that would speak if they had the sequence's tokens."""


class DrafterChain:
    """Drafters that are asked in turn. One that raises is not asked about that sequence again."""

    def __init__(self, drafters: SequenceOf[Drafter]) -> None:
        """Remote drafters can be let go on during a verification; see PrefetchingDrafter."""
        self._drafters = [
            PrefetchingDrafter(drafter) if isinstance(drafter, RemoteDrafter) else drafter
            for drafter in drafters
        ]
        self.remote = tuple(d for d in self._drafters if isinstance(d, PrefetchingDrafter))
        self.early_exit = next((d for d in drafters if isinstance(d, EarlyExit)), None)
        self._silenced: set[tuple[str, str]] = set()
        """Sequence id and source where a drafter has raised: it would again."""

    def turn_of(self, sequence: Sequence, max_tokens: int) -> Turn:
        """The turn of the first drafter that has drafts or is ready to be asked, else of the first
        that has to catch up."""
        if max_tokens <= 0 or sequence.is_done:
            return Turn(sequence=sequence)
        first_behind: Turn | None = None
        behind: list[PrefetchingDrafter] = []
        for drafter in self._drafters:
            if sequence.params.drafter not in (None, drafter.source):
                continue
            turn = None
            with self._silencing(drafter.source, sequence):
                if (sequence.seq_id, drafter.source) not in self._silenced:
                    turn = _ask(drafter, sequence, max_tokens)
            if turn is None:
                continue
            if not turn.behind:
                return replace(turn, behind=tuple(behind))
            first_behind = first_behind or turn
            behind += turn.behind
        return replace(first_behind or Turn(sequence=sequence), behind=tuple(behind))

    def catch_up(self, turn: Turn) -> None:
        """Let the drafters that are behind catch up, for later rounds."""
        for drafter in turn.behind:
            with self._silencing(drafter.source, turn.sequence):
                drafter.catch_up(turn.sequence)

    async def propose(
        self, requests: Mapping[PrefetchingDrafter, SequenceOf[DraftRequest]]
    ) -> Proposed:
        """What remote drafters bring."""
        calls = [drafter.propose(asked) for drafter, asked in requests.items()]
        # a task of its own would start a turn of the event loop later
        parts = [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)
        return Proposed.together(parts)

    def learn(self) -> None:
        """Let drafters go on with what they learn of all sequences, while the target computes."""
        for drafter in self._drafters:
            if isinstance(drafter, Learner):
                drafter.learn()

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        for drafter in self._drafters:
            with self._silencing(drafter.source, sequence):
                drafter.forget(sequence)
        self._silenced -= {(sequence.seq_id, drafter.source) for drafter in self._drafters}

    async def close(self) -> None:
        """End what runs in the background."""
        for drafter in self.remote:
            await drafter.close()

    @contextmanager
    def _silencing(self, source: str, sequence: Sequence) -> Iterator[None]:
        """Log what a drafter raises within; it says nothing of this sequence any more."""
        try:
            yield
        except Exception:
            logger.exception("%s goes on without drafts by %s", sequence.seq_id, source)
            self._silenced.add((sequence.seq_id, source))


def _ask(
    drafter: LocalDrafter | PrefetchingDrafter, sequence: Sequence, max_tokens: int
) -> Turn | None:
    """A drafter's own turn; None where it has nothing to say."""
    if isinstance(drafter, EarlyExit):
        return _ask_early_exit(drafter, sequence, max_tokens)
    if not isinstance(drafter, PrefetchingDrafter):
        drafts = drafter.draft(sequence, max_tokens)
        if not drafts.tokens:
            return None
        drafts = sound(drafts, source=drafter.source, max_tokens=max_tokens)
        return Turn(
            sequence=sequence,
            source=drafter.source,
            max_tokens=len(drafts.tokens),
            in_hand=drafts,
        )
    offer = drafter.offer(sequence, max_tokens)
    if offer is None:
        return None
    return Turn(
        sequence=sequence,
        source=drafter.source,
        max_tokens=min(offer.max_tokens, max_tokens),
        remote=drafter if offer.is_ready else None,
        behind=() if offer.is_ready else (drafter,),
    )


def _ask_early_exit(drafter: EarlyExit, sequence: Sequence, max_tokens: int) -> Turn | None:
    """The turn of the target's own drafts: some may have come, and others be asked for."""
    drafts = drafter.draft(sequence, max_tokens)
    num_ahead = drafter.most_ahead(sequence, max_tokens)
    if not drafts.tokens and not num_ahead:
        return None
    return Turn(
        sequence=sequence,
        source=drafter.source,
        max_tokens=num_ahead,
        in_hand=drafts,
        decision=drafter.decision_about(sequence) if drafts.tokens else None,
        is_ahead=True,
    )
