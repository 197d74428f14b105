"""The time that is put by for rounds that do not seem the best."""

import math
from dataclasses import replace

import pytest

from deployments.router.policy.exploration import EXPLORE_SHARE, FREE_TRIES, Exploration
from deployments.router.policy.gamma import ObservedRound, Reason
from deployments.router.policy.planner import Plan, Prompts


def plan(*, drafts_pay: bool) -> Plan:
    """For one sequence: 10 ms without drafts, 20 ms with them for 3 tokens or for 1.1."""
    num_more = 2.0 if drafts_pay else 0.1
    return Plan(
        gammas=[2], time_s=0.020, num_more=num_more, plain_s=0.010, prompts=Prompts(),
        tokens_per_s=150.0 if drafts_pay else 100.0,
    )  # fmt: skip


def begun(asked: Plan) -> Exploration:
    """One that has made the tries that it makes at first, and has nothing left."""
    exploration = Exploration()
    num_tries = 0
    while exploration.begins(asked):
        num_tries += 1
    assert num_tries == (1 if asked.pays else 1 + FREE_TRIES)
    return exploration


def tried(*, seconds: float, num_committed: int, reason: Reason = Reason.EXPLORE) -> ObservedRound:
    return ObservedRound(
        reason=reason, outcomes=(), num_sequences=1, num_drafted=0, longest_draft=0, num_tokens=1,
        num_committed=num_committed, draft_s=None, draft_compute_s=0.0, draft_further_s=0.0,
        verify_s=seconds, verify_compute_s=seconds, router_s=0.0, round_s=seconds,
    )  # fmt: skip


@pytest.mark.parametrize("drafts_pay", [False, True])
class TestExploration:
    def test_it_tries_at_first_and_then_for_its_share_of_the_time(self, drafts_pay: bool) -> None:
        asked = plan(drafts_pay=drafts_pay)
        exploration = begun(asked)
        num_tries = sum(exploration.begins(asked) for _ in range(5000))
        share_s = 5000 * EXPLORE_SHARE * asked.plain_s
        assert num_tries == pytest.approx(share_s / 0.010, rel=0.05)

    def test_a_try_that_has_lost_nothing_is_made_again_at_once(self, drafts_pay: bool) -> None:
        asked = plan(drafts_pay=drafts_pay)
        exploration = begun(asked)
        best = tried(seconds=2 / asked.tokens_per_s, num_committed=2)
        exploration.observe(best)
        assert exploration.begins(asked)

    @pytest.mark.parametrize("seconds", [0.020, 10.0])
    def test_after_a_loss_it_waits_no_longer_than_was_expected(
        self, drafts_pay: bool, seconds: float
    ) -> None:
        """However long the round took: a stall says nothing of the next."""
        asked = plan(drafts_pay=drafts_pay)
        exploration = begun(asked)
        exploration.observe(tried(seconds=seconds, num_committed=1))
        waited = next(index for index in range(1000) if exploration.begins(asked))
        assert 50 <= waited <= 100

    def test_other_rounds_put_nothing_back(self, drafts_pay: bool) -> None:
        asked = plan(drafts_pay=drafts_pay)
        exploration = begun(asked)
        exploration.observe(tried(seconds=0.001, num_committed=3, reason=Reason.BEST))
        assert not exploration.begins(asked)


@pytest.mark.parametrize("is_unclear", [False, True])
def test_what_may_not_be_drafted_is_not_tried(is_unclear: bool) -> None:
    """As beside a prompt that would wait for too long; its time counts as without end."""
    asked = plan(drafts_pay=False)
    exploration = begun(asked)
    if is_unclear:
        exploration.observe(replace(tried(seconds=0.020, num_committed=1), longest_draft=2))
    for _ in range(1000):
        assert not exploration.begins(replace(asked, time_s=math.inf))
    num_tries = sum(exploration.begins(asked) for _ in range(5000))
    share_s = 5000 * EXPLORE_SHARE * asked.plain_s
    assert num_tries == pytest.approx(share_s / 0.010, rel=0.05)


def test_second_drafts_are_tried_for_a_share_of_the_time_where_one_each_seems_best() -> None:
    exploration, one_each = Exploration(), replace(plan(drafts_pay=True), gammas=[1], draft_s=0.002)
    num_tries = sum(exploration.goes_deeper(one_each) for _ in range(2000))
    assert num_tries == pytest.approx(2000 * EXPLORE_SHARE * one_each.plain_s / 0.002, rel=0.05)
    assert not any(exploration.goes_deeper(plan(drafts_pay=True)) for _ in range(2000))


@pytest.mark.parametrize("draft_s", [None, 0.001])
def test_a_try_in_which_drafters_first_read_is_followed_by_one_more(draft_s: float | None) -> None:
    """The two are paid for together."""
    asked = plan(drafts_pay=False)
    unclear = replace(
        tried(seconds=0.020, num_committed=1), longest_draft=2, num_drafted=1, draft_s=None
    )
    exploration = begun(asked)
    exploration.observe(unclear)
    assert exploration.begins(asked)
    exploration.observe(replace(unclear, draft_s=draft_s))
    waited = next(index for index in range(1000) if exploration.begins(asked))
    assert 150 <= waited <= 200


def test_what_drafters_read_in_a_try_is_paid_for_but_a_stall_meanwhile_is_not() -> None:
    """100 ms of a second beyond the price, where 0.1 ms is put by in a round."""
    asked = plan(drafts_pay=False)
    read = replace(
        tried(seconds=1.0, num_committed=1), longest_draft=2, draft_s=None, draft_compute_s=0.1
    )
    exploration = begun(asked)
    exploration.observe(read)
    assert exploration.begins(asked)  # one more, of drafts in a row
    waited = next(index for index in range(10_000) if exploration.begins(asked))
    assert 1000 < waited <= 1250


def test_a_try_of_the_controller_before_is_nothing_to_learn_from() -> None:
    """Its round may still have been under way when another controller took over."""
    exploration = Exploration()
    exploration.observe(tried(seconds=0.010, num_committed=1))
    assert exploration.begins(plan(drafts_pay=True))
