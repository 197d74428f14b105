"""Drafters: the two kinds, and what a drafter promises.

There are two kinds. A local drafter lives in the router's process and has its drafts at once. A
remote one is behind a network: it says first whether it is ready, and is asked for drafts once it
is known how many are wanted. Before every round the drafters are asked in the order of the option
`drafter`, for each sequence anew; the first that has something to say speaks for it.

Whatever a drafter raises, and whatever it brings, costs drafts and nothing else: the target decides
every token. So a drafter need not be right, only fast.
"""

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from deployments.router.sequence import Sequence
from workers.types import DraftTokens

Drafts = dict[str, DraftTokens]
"""Drafts by sequence id."""


class LocalDrafter(Protocol):
    """Guesses the next tokens of sequences in the router's process, at once.

    It reads a sequence's committed tokens in place; they only ever grow. What it keeps of a
    sequence is its own affair, until `forget`.
    """

    @property
    def source(self) -> str:
        """The drafter's name, as in the option `drafter`: acceptance is learnt under it."""
        ...

    def draft(self, sequence: Sequence, max_tokens: int) -> DraftTokens:
        """At most `max_tokens` (at least 1) drafts; none where it has nothing to say."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended: free what is kept of it. It may be unknown here."""
        ...


@runtime_checkable
class Learner(Protocol):
    """A local drafter that learns of more than the sequence that it drafts for."""

    def learn(self) -> None:
        """Go on with what waits to be learnt, for few milliseconds: once a round, while the target
        computes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a remote drafter says before a round about one sequence."""

    max_tokens: int
    """The most drafts that can be had of it; at least one."""
    is_ready: bool
    """Whether drafts would come in this round. If not, it has to be told to catch up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """Drafts that a remote drafter is asked for; see ProposeRequest."""

    sequence: Sequence
    k: int
    stop_below: float = 0.0
    assumed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """What a remote drafter brought."""

    drafts: Drafts = field(default_factory=dict)
    """At most what was asked for; sequences without drafts may be missing."""
    num_asked: int = 0
    """Sequences that workers were asked about in this round: not those with drafts in hand."""
    compute_s: float = 0.0
    """Seconds that workers spent in steps: of several workers the one that took longest."""
    further_s: float = 0.0
    """The part of `compute_s` that went into further drafts than the first of each sequence."""
    is_typical: bool = False
    """Whether the workers did nothing but draft meanwhile, so that the time tells what drafting
    costs."""
    is_after_prefetch: bool = False
    """Whether some of the sequences had been prefetched, rightly or wrongly."""

    @classmethod
    def together(cls, parts: SequenceOf["Proposed"]) -> "Proposed":
        """What several workers brought at a time."""
        return cls(
            drafts={seq_id: drafts for part in parts for seq_id, drafts in part.drafts.items()},
            num_asked=sum(part.num_asked for part in parts),
            compute_s=max((part.compute_s for part in parts), default=0.0),
            further_s=max((part.further_s for part in parts), default=0.0),
            is_typical=bool(parts) and all(part.is_typical for part in parts),
            is_after_prefetch=any(part.is_after_prefetch for part in parts),
        )


@runtime_checkable
class RemoteDrafter(Protocol):
    """A drafter that takes time, and keeps state of its own that can be lost or behind."""

    @property
    def source(self) -> str:
        """The drafter's name, as in the option `drafter`: acceptance and cost are learnt under
        it."""
        ...

    def offer(self, sequence: Sequence, max_tokens: int) -> Offer | None:
        """Whether at most `max_tokens` (at least 1) drafts could be had; None for none ever."""
        ...

    def catch_up(self, sequence: Sequence) -> None:
        """Begin, in the background, to take in the tokens that it lacks; returns at once."""
        ...

    async def propose(self, requests: SequenceOf[DraftRequest]) -> Proposed:
        """Drafts for sequences that it was ready for; never later than its own deadline."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended: free what is kept of it. It may be unknown here."""
        ...

    async def close(self) -> None:
        """End what runs in the background."""
        ...


Drafter = LocalDrafter | RemoteDrafter


def sound(drafts: DraftTokens, *, source: str, max_tokens: int) -> DraftTokens:
    """What may be used of drafts: at most so many, with confidences if each has one in [0, 1].

    Drafts with a law have none: how many of them are verified must not depend on which tokens were
    drawn, and how sure a drafter is of its tokens depends on those before them.
    """
    drafts = replace(drafts.first(max_tokens), source=source)
    confidences = drafts.confidences
    has_all = len(confidences) == len(drafts.tokens) and not drafts.law
    if has_all and all(math.isfinite(c) and 0.0 <= c <= 1.0 for c in confidences):
        return drafts
    return replace(drafts, confidences=())
