"""The time that is put by for rounds that do not seem the best."""

import pytest

from deployments.router.policy.exploration import EXPLORE_SHARE, Exploration
from deployments.router.policy.gamma import ObservedRound, Reason
from deployments.router.policy.planner import Plan, Prompts


def plan(*, drafts_pay: bool) -> Plan:
    """For one sequence: 10 ms without drafts, 20 ms with them for 3 tokens or for 1.1."""
    num_expected = 3.0 if drafts_pay else 1.1
    return Plan(
        gammas=[2], time_s=0.020, num_expected=num_expected, plain_s=0.010, prompts=Prompts(),
        tokens_per_s=150.0 if drafts_pay else 100.0,
    )  # fmt: skip


def tried(*, seconds: float, num_committed: int, reason: Reason = Reason.EXPLORE) -> ObservedRound:
    return ObservedRound(
        reason=reason, outcomes=(), num_sequences=1, num_drafted=0, longest_draft=0, num_tokens=1,
        num_committed=num_committed, draft_s=None, draft_compute_s=0.0, verify_s=seconds,
        verify_compute_s=seconds, round_s=seconds,
    )  # fmt: skip


@pytest.mark.parametrize("drafts_pay", [False, True])
class TestExploration:
    def test_it_tries_at_once_and_then_for_its_share_of_the_time(self, drafts_pay: bool) -> None:
        exploration, asked = Exploration(), plan(drafts_pay=drafts_pay)
        assert exploration.begins(asked)
        num_tries = sum(exploration.begins(asked) for _ in range(5000))
        share_s = 5000 * EXPLORE_SHARE * asked.plain_s
        assert num_tries == pytest.approx(share_s / 0.010, rel=0.05)

    def test_a_try_that_has_lost_nothing_is_made_again_at_once(self, drafts_pay: bool) -> None:
        exploration, asked = Exploration(), plan(drafts_pay=drafts_pay)
        assert exploration.begins(asked)
        best = tried(seconds=2 / asked.tokens_per_s, num_committed=2)
        exploration.observe(best)
        assert exploration.begins(asked)

    @pytest.mark.parametrize("seconds", [0.020, 10.0])
    def test_after_a_loss_it_waits_no_longer_than_was_expected(
        self, drafts_pay: bool, seconds: float
    ) -> None:
        """However long the round took: a stall says nothing of the next."""
        exploration, asked = Exploration(), plan(drafts_pay=drafts_pay)
        assert exploration.begins(asked)
        exploration.observe(tried(seconds=seconds, num_committed=1))
        waited = next(index for index in range(1000) if exploration.begins(asked))
        assert 50 <= waited <= 100

    def test_other_rounds_put_nothing_back(self, drafts_pay: bool) -> None:
        exploration, asked = Exploration(), plan(drafts_pay=drafts_pay)
        assert exploration.begins(asked)
        exploration.observe(tried(seconds=0.001, num_committed=3, reason=Reason.BEST))
        assert not exploration.begins(asked)


def test_a_try_of_the_controller_before_is_nothing_to_learn_from() -> None:
    """Its round may still have been under way when another controller took over."""
    exploration = Exploration()
    exploration.observe(tried(seconds=0.010, num_committed=1))
    assert exploration.begins(plan(drafts_pay=True))
