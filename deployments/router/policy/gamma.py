"""How far to speculate: what a controller is asked and told, and a fixed length.

A controller decides a round twice: before drafting how far to draft (`choose`), and once the drafts
and their confidences are known which of them to verify (`select`). It is told afterwards what
became of them (`observe`), perhaps only when the next round is under way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Protocol

from workers.types import Rule, StepTime


class Maker(Enum):
    """What makes the drafts of a sequence; on that it depends what they cost."""

    NOBODY = "nobody"
    """The drafts are in hand already."""
    DRAFTER = "drafter"
    """A drafter makes them; it is asked before the verification."""
    TARGET = "target"
    """The target makes them itself after a verification, for the next round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A sequence of the coming round."""

    seq_id: str
    max_gamma: int
    """The most draft tokens it may have: 0 where nothing drafts for it."""
    source: str = "model"
    """The name of the drafter that drafts for it. Acceptance is learnt per source."""
    is_sampled: bool = False
    """Whether its tokens are drawn, not the likeliest ones."""
    rule: Rule = "coupled"
    """The rule by which its drafts are judged."""
    maker: Maker = Maker.DRAFTER
    """What makes its drafts. Those of the target are for the round after the coming one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """The drafts of a sequence, before they are verified."""

    seq_id: str
    num_draft_tokens: int
    source: str = "model"
    confidences: tuple[float, ...] = ()
    """The source's confidence per draft token; empty where it does not say."""
    is_sampled: bool = False
    rule: Rule = "coupled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a sequence's verified drafts."""

    seq_id: str
    num_draft_tokens: int
    num_tested: int
    """Drafts that the target compared with its own token: the accepted ones and the first that was
    rejected."""
    num_accepted: int
    num_committed: int
    """Tokens that the text grew by: fewer than num_accepted + 1 where it ended before."""
    source: str = "model"
    confidences: tuple[float, ...] = ()
    is_sampled: bool = False
    rule: Rule = "coupled"

    @property
    def num_accepted_in_text(self) -> int:
        """Accepted drafts before the last committed token, which counts as the target's own."""
        return max(0, min(self.num_accepted, self.num_committed - 1))

    @property
    def num_tested_in_text(self) -> int:
        """Tested drafts that stand in the text."""
        return min(self.num_tested, self.num_committed)


class Reason(StrEnum):
    """Why a round drafts as far as it does."""

    FIXED = "fixed"
    """The draft length is an option."""
    BEST = "best"
    """The most tokens per second are expected of it."""
    NOT_WORTH = "not_worth"
    """Drafts would cost more than they bring."""
    FIRST = "first"
    """The first round of a sequence that nobody can draft for yet."""
    EXPLORE = "explore"
    """Drafts where they do not seem to pay, or none where they do, to see what that brings."""
    FAILED = "failed"
    """Choosing or making drafts raised an error, so there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRound:
    """What a round did, and its times where they teach something."""

    reason: Reason
    outcomes: tuple[Outcome, ...]
    """One for each sequence that was verified with drafts."""
    num_sequences: int
    num_drafted: int
    """Sequences that drafters were asked to draft for."""
    longest_draft: int
    """Tokens of the longest draft; if drafters brought nothing in time, what they were asked for.
    0 if no drafter was asked."""
    num_tokens: int
    """Tokens that the target ran in the steps of the round, drafts and other callers' included."""
    num_committed: int
    """Tokens that the texts of the round grew by."""
    draft_s: float | None
    """Seconds from asking the drafters to their answer. None if they also did something else, such
    as reading a prompt, or began before the round: such a time says nothing of what drafts cost."""
    draft_compute_s: float
    """The part of `draft_s` that the drafters spent in steps."""
    draft_further_s: float
    """The part of `draft_compute_s` that went into further drafts than the first of each sequence,
    before which a drafter reads what is new."""
    verify_s: float | None
    """Seconds from asking the target to its answer. None if that was not exactly one step with the
    tokens of this round, as when it also ran part of a prompt or a drafter ran beside it."""
    verify_compute_s: float
    """The part of `verify_s` that the target spent in steps; the rest is the hop."""
    router_s: float
    """Seconds that the router itself took, beside drafting and verifying."""
    round_s: float
    """Seconds from the end of the round before to the end of this one, clean or not."""
    num_ahead: int = 0
    """Sequences that the target was asked to draft for itself, for their next round."""
    longest_ahead: int = 0
    """Tokens of the longest of those drafts."""
    ahead_s: float | None = None
    """Seconds that the target spent on them, which count neither as drafting nor as verifying. None
    if others may have been drafted for too."""
    is_overlapped: bool = False
    """Whether drafters went on during the verification."""
    is_after_overlap: bool = False
    """Whether drafters had gone on during the verification before this round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How far to draft in a round."""

    gammas: list[int]
    """The draft length of each candidate, in their order."""
    stop_below: list[float]
    """Where each drafter may stop, in the order of the candidates; see ProposeRequest."""
    reason: Reason


class GammaController(Protocol):
    def choose(self, candidates: Sequence[Candidate], *, num_prefill_tokens: int) -> Decision:
        """The draft lengths of a round.

        The target will run `num_prefill_tokens` of prompts that wait in the same step.
        """
        ...

    def select(self, decision: Decision, drafted: Sequence[Drafted]) -> list[int]:
        """How many draft tokens of each sequence to verify, in the order of `drafted`.

        The choice may depend on how confident the drafter was of these very tokens. That changes
        no text where the target's own sample decides. Under rules that compare laws it would, so
        what was drawn for them has no confidences.
        """
        ...

    def observe(self, observed: ObservedRound) -> None:
        """Learn from a round."""
        ...

    def forget(self, seq_id: str) -> None:
        """A sequence has ended; may be told more than once."""
        ...

    def use_steps(
        self, *, target_steps: Sequence[StepTime], draft_steps: Sequence[StepTime]
    ) -> None:
        """Go on with other tables of the workers' step times."""
        ...


class FixedGamma:
    """The same draft length for all sequences; learns nothing."""

    def __init__(self, gamma: int) -> None:
        self._gamma = gamma

    def choose(
        self,
        candidates: Sequence[Candidate],
        *,
        num_prefill_tokens: int,  # noqa: ARG002
    ) -> Decision:
        gammas = [min(self._gamma, candidate.max_gamma) for candidate in candidates]
        return Decision(gammas=gammas, stop_below=[0.0] * len(gammas), reason=Reason.FIXED)

    def select(
        self,
        decision: Decision,  # noqa: ARG002
        drafted: Sequence[Drafted],
    ) -> list[int]:
        return [draft.num_draft_tokens for draft in drafted]

    def observe(self, observed: ObservedRound) -> None: ...

    def forget(self, seq_id: str) -> None: ...

    def use_steps(
        self, *, target_steps: Sequence[StepTime], draft_steps: Sequence[StepTime]
    ) -> None: ...
