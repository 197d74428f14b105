"""The first round of a sequence: whether drafters read its prompt meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from deployments.router.drafting.overlap import make_overlap
from deployments.router.drafting.protocol import DraftRequest, Offer, Proposed
from deployments.router.policy.gamma import Candidate, Decision, FixedGamma, Reason
from deployments.router.sequence import Sequence as LiveSequence
from deployments.router.speculation import Policies, Speculation
from tests.deployments.loops import Stream, make_params


class Scripted(FixedGamma):
    """Wants what it is told to."""

    def __init__(self) -> None:
        super().__init__(0)
        self.gamma = 0
        self.asked: list[int] = []
        """The number of sequences of each question."""

    def choose(self, candidates: Sequence[Candidate], *, num_prefill_tokens: int) -> Decision:
        self.asked.append(len(candidates))
        self._gamma = self.gamma
        return super().choose(candidates, num_prefill_tokens=num_prefill_tokens)


@dataclass
class Unread:
    """A remote drafter that is never ready, and notes what it is to read."""

    source: str = "model"
    reads: list[LiveSequence] = field(default_factory=list)

    def offer(self, sequence: LiveSequence, max_tokens: int) -> Offer | None:  # noqa: ARG002
        return Offer(max_tokens=max_tokens, is_ready=False)

    def catch_up(self, sequence: LiveSequence) -> None:
        self.reads.append(sequence)

    async def propose(self, requests: list[DraftRequest]) -> Proposed:
        raise AssertionError(requests)

    def forget(self, sequence: LiveSequence) -> None: ...

    async def close(self) -> None: ...


@dataclass
class World:
    gamma: Scripted = field(default_factory=Scripted)
    drafter: Unread = field(default_factory=Unread)

    def __post_init__(self) -> None:
        policies = Policies(
            gamma=self.gamma, overlap=make_overlap("off"), max_gamma=8, max_model_len=100
        )
        self.speculation = Speculation([self.drafter], policies, clock=lambda: 0.0)

    async def round(self, sequences: list[LiveSequence], *, gamma: int) -> Reason:
        self.gamma.gamma = gamma
        speculated = await self.speculation.draft(sequences, num_prefill_tokens=0)
        for sequence in sequences:
            sequence.target.cached_len = len(sequence.tokens)
        return speculated.reason


def sequence(seed: int) -> LiveSequence:
    return Stream(make_params(seed)).sequence


@pytest.mark.parametrize("last_gamma", [0, 3])
async def test_new_sequences_are_read_if_the_last_round_wanted_drafts(last_gamma: int) -> None:
    """By themselves they would have been drafted for, which says nothing of the others' rounds."""
    world, others, new = World(), [sequence(1), sequence(2)], sequence(3)
    await world.round(others, gamma=last_gamma)
    await world.round(others, gamma=last_gamma)
    world.drafter.reads.clear()
    assert await world.round([new], gamma=8) is Reason.FIRST
    assert world.gamma.asked == [2, 2]
    assert world.drafter.reads == ([new] if last_gamma else [])


async def test_the_first_of_all_is_asked_about() -> None:
    world, first = World(), sequence(1)
    assert await world.round([first], gamma=8) is Reason.FIXED
    assert world.drafter.reads == [first]


async def test_a_text_that_ends_says_nothing_of_the_next() -> None:
    """Its last round can have no drafts."""
    world, old, new = World(), sequence(1), sequence(2)
    await world.round([old], gamma=8)
    old.tokens += [5] * (old.num_remaining - 1)
    await world.round([old], gamma=8)
    world.drafter.reads.clear()
    await world.round([new], gamma=8)
    assert world.drafter.reads == [new]


async def test_what_is_not_read_yet_is_asked_about_from_the_second_round_on() -> None:
    world, others, new = World(), [sequence(1)], sequence(2)
    await world.round(others, gamma=0)
    await world.round([new], gamma=0)
    assert await world.round([*others, new], gamma=4) is Reason.FIXED
    assert new in world.drafter.reads
