"""How far to speculate. Pure: no clock, no Ray, no torch.

A controller is asked once per round for every sequence that is about to be verified, and told
afterwards what became of the drafts, perhaps only when the next round is under way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A sequence of the coming round."""

    seq_id: str
    max_gamma: int
    """What the tokens left and the configured maximum allow; 0 where there is no drafter."""
    source: str = ""
    """Which drafter would draft it."""
    is_free: bool = False
    """Whether its drafts are in hand, so that only verifying them costs anything; `max_gamma` is
    how many there are."""
    is_sampled: bool = False
    """Whether its tokens are drawn, not the likeliest ones."""
    is_catching_up: bool = False
    """Whether its drafter is busy with its tokens, so that no draft would come of asking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a sequence's drafts in a round."""

    seq_id: str
    num_draft_tokens: int
    num_tested: int
    num_accepted: int
    num_committed: int
    """Tokens that the text grew by: fewer than num_accepted + 1 where it ended before."""
    confidences: tuple[float, ...] = ()
    """The drafter's, per draft token; empty where it did not say."""
    is_sampled: bool = False
    source: str = ""
    """Which drafter the drafts were from."""

    @property
    def num_accepted_in_text(self) -> int:
        """Accepted drafts before the last committed token, which counts as the target's own."""
        return max(0, min(self.num_accepted, self.num_committed - 1))

    @property
    def num_tested_in_text(self) -> int:
        return min(self.num_tested, self.num_committed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """What a drafter brought for a sequence."""

    seq_id: str
    num_draft_tokens: int
    confidences: tuple[float, ...]
    is_sampled: bool = False
    source: str = ""
    """Which drafter they are from."""


class Reason(StrEnum):
    """Why a round drafts as far as it does."""

    FIXED = "fixed"
    FIRST = "first"
    """Nothing has been measured yet."""
    BEST = "best"
    """The most tokens per second are expected of it."""
    VARIED = "varied"
    """Shorter or longer than the best, to learn what a token costs."""
    NOT_WORTH = "not_worth"
    """Drafts would cost more than they bring."""
    PROBE = "probe"
    """As before, but one token is drafted to see whether it would pay by now."""
    TRIAL = "trial"
    """As before, but drafts are made as if they paid, to learn what they cost by now."""
    FAILED = "failed"
    """Choosing or making drafts raised an error, so there are none."""

    @property
    def is_waited_for(self) -> bool:
        """Whether what becomes of the round decides of the next."""
        return self in (Reason.FIRST, Reason.PROBE, Reason.TRIAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRound:
    """What a round did and what it took."""

    reason: Reason
    outcomes: tuple[Outcome, ...]
    """Of the sequences that were verified with drafts."""
    num_sequences: int
    num_drafted: int
    """Sequences that drafters were asked to draft for."""
    longest_draft: int
    """That drafters made; if they brought nothing in time, that they were asked for."""
    num_tokens: int
    """Run by the target in the steps of the round, drafts and other callers' tokens included."""
    num_committed: int
    """That the sequences of the round grew by."""
    is_draft_typical: bool
    """Whether the drafters did nothing else meanwhile, such as catching up on a prompt."""
    is_verify_typical: bool
    """Whether the round was one step of the target, that had not to wait for another, as the first
    round of a sequence often has."""
    is_disturbed: bool
    """Whether requests have come or gone of late, which takes the processor from workers on the
    same machine; among the tokens of prompts that does not show. Beside those, whether they are of
    a long one, whose later tokens cost more than others."""
    is_overlapped: bool
    """Whether drafters went on during the verification."""
    is_after_overlap: bool
    """Whether drafters had gone on during the verification before this round."""
    draft_s: float
    """The way to the drafters and back included."""
    verify_s: float

    @property
    def tells_draft_cost(self) -> bool:
        return self.longest_draft > 0 and self.is_draft_typical


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    gammas: list[int]
    """The draft length of each candidate, in their order."""
    stop_below: list[float]
    """See ProposeRequest; one for each candidate."""
    reason: Reason
    tokens_per_s: float | None = None
    """What the target's time is worth in this round; None if all drafts are to be verified."""


class GammaController(Protocol):
    def prepare(self, candidates: Sequence[Candidate], *, num_beside: int) -> None:
        """Think about the next choice, which will probably be of these arguments.

        Called while a round is under way, when nobody waits for the answer.
        """
        ...

    def choose(self, candidates: Sequence[Candidate], *, num_beside: int) -> Decision:
        """The draft lengths of this round.

        `num_beside` tokens of others, such as prompts that wait, are to be run in the same step.
        """
        ...

    def keep(self, decision: Decision, drafted: Sequence[Drafted], *, num_others: int) -> list[int]:
        """Of what was drafted by a decision, how many tokens of each sequence to verify.

        `num_others` tokens of the step are of others: of sequences without drafts, of prompts.
        They depend on how sure the drafter was of these very tokens. That changes no text where
        the target's own sample decides; under the ratio test it would.
        """
        ...

    def observe(self, observed: ObservedRound) -> None:
        """Learn from a round."""
        ...

    def forget(self, seq_id: str) -> None:
        """A sequence has ended."""
        ...


class FixedGamma:
    """The same draft length for all."""

    def __init__(self, gamma: int) -> None:
        self._gamma = gamma

    def prepare(self, candidates: Sequence[Candidate], *, num_beside: int) -> None:
        """Nothing to think about."""

    def choose(
        self,
        candidates: Sequence[Candidate],
        *,
        num_beside: int,  # noqa: ARG002
    ) -> Decision:
        gammas = [min(self._gamma, candidate.max_gamma) for candidate in candidates]
        return Decision(gammas=gammas, stop_below=[0.0] * len(gammas), reason=Reason.FIXED)

    def keep(
        self,
        decision: Decision,  # noqa: ARG002
        drafted: Sequence[Drafted],
        *,
        num_others: int,  # noqa: ARG002
    ) -> list[int]:
        return [of_sequence.num_draft_tokens for of_sequence in drafted]

    def observe(self, observed: ObservedRound) -> None:
        """Nothing to learn."""

    def forget(self, seq_id: str) -> None:
        """Nothing was learnt."""
