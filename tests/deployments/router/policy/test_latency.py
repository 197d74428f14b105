"""What is known of the times of steps, against machines that are known."""

from random import Random

import numpy as np
import pytest

from deployments.router.policy.gamma import ObservedRound, Reason
from deployments.router.policy.latency import Follower, Latency, StepTable
from workers.types import StepTime


def times(*points: tuple[int, int, float]) -> list[StepTime]:
    return [StepTime(num_sequences=n, num_tokens=t, seconds=s) for n, t, s in points]


def observed(
    *,
    longest: int,
    num_tokens: int,
    draft: tuple[float, float],
    verify: tuple[float, float] | None,
    router_s: float = 0.0,
) -> ObservedRound:
    """Times as (hop, steps)."""
    verify_s = None if verify is None else sum(verify)
    return ObservedRound(
        reason=Reason.BEST, outcomes=(), num_sequences=1, num_drafted=1, longest_draft=longest,
        num_tokens=num_tokens, num_committed=1, draft_s=sum(draft), draft_compute_s=draft[1],
        draft_further_s=draft[1] * (longest - 1) / max(1, longest),
        verify_s=verify_s, verify_compute_s=verify[1] if verify else 0.0, router_s=router_s,
        round_s=0.0,
    )  # fmt: skip


class TestStepTable:
    def test_it_is_exact_where_it_was_measured_and_straight_between(self) -> None:
        table = StepTable(times((1, 1, 1.0), (1, 8, 2.0), (1, 9, 5.0), (4, 4, 2.0), (4, 9, 6.0)))
        assert table.seconds(1, [1, 8, 8.5, 9]) == pytest.approx([1.0, 2.0, 3.5, 5.0])
        assert table.seconds(4, [4, 9]) == pytest.approx([2.0, 6.0])
        assert float(table.seconds(2, 9)) == pytest.approx(5.0 + 1.0 / 3)
        assert float(table.seconds(64, 4)) == pytest.approx(2.0)

    def test_fewer_tokens_than_a_row_begins_with_cost_no_more_than_they_do(self) -> None:
        """The row of 8 sequences lies between those of 4 and of 16."""
        points = [(n, t, 0.010 + 0.008 * t) for n in (4, 16) for t in (4, 16, 64) if t >= n]
        assert float(StepTable(times(*points)).seconds(8, 8)) == pytest.approx(0.074)

    def test_beyond_its_end_a_row_rises_like_those_of_more_sequences(self) -> None:
        table = StepTable(times((1, 1, 1.0), (1, 2, 1.0), (4, 4, 1.0), (4, 64, 2.0), (4, 128, 6.0)))
        assert table.seconds(1, [64, 128]) == pytest.approx([2.0, 6.0])
        assert float(table.seconds(4, 256)) > 10.0

    def test_noise_and_nonsense_do_no_harm(self) -> None:
        points = times((1, 1, 1.0), (1, 2, 0.9), (1, 4, float("nan")), (1, 8, 0.0), (1, 16, 2.0))
        seconds = StepTable(points).seconds(1, np.arange(1, 17))
        assert np.all(np.diff(seconds) >= 0.0)
        assert seconds[0] == 1.0

    def test_without_times_all_steps_take_the_same(self) -> None:
        assert not StepTable(())
        assert StepTable(()).seconds(3, [3, 9]) == pytest.approx([1.0, 1.0])
        assert float(StepTable(()).seconds(1, 1)) == 1.0


class TestFollower:
    def test_a_stall_is_soon_forgiven(self) -> None:
        follower = Follower(1.0)
        for _ in range(20):
            follower.observe(0.050)
        follower.observe(5.0)
        assert follower.value < 0.055

    @pytest.mark.parametrize("factor", [0.05, 0.5, 2.0, 20.0])
    def test_a_machine_that_changes_is_soon_known(self, factor: float) -> None:
        follower, rng = Follower(1.0), Random(0)
        for _ in range(100):
            follower.observe(rng.uniform(0.9, 1.1))
        for _ in range(40):
            follower.observe(factor * rng.uniform(0.9, 1.1))
        assert follower.value == pytest.approx(factor, rel=0.15)

    def test_stalls_leave_kin_where_it_is(self) -> None:
        """What is not seen for long goes up and down with what is, by the same factor."""
        seen, kin, rng = Follower(1.0, experience=1.0), Follower(2.0, experience=1.0), Random(0)
        kin.observe(2.0)
        for _ in range(3000):
            stall = 8.0 if rng.random() < 0.15 else 1.0
            seen.observe(stall * rng.uniform(0.8, 1.2), kin=kin)
        assert kin.value / seen.value == pytest.approx(2.0, rel=0.3)

    def test_noise_is_averaged(self) -> None:
        follower, rng, values = Follower(1.0), Random(0), []
        for _ in range(2000):
            follower.observe(rng.gammavariate(8, 1 / 8))
            values.append(follower.value)
        assert np.std(values[200:]) < 0.08


class TestLatency:
    def test_hops_and_slower_steps_are_told_apart(self) -> None:
        latency = Latency(
            target_steps=times((1, 1, 0.010), (1, 64, 0.073)), draft_steps=times((1, 1, 0.001))
        )
        for index in range(100):
            longest, num_tokens = 1 + index % 4, 2 + index % 4
            step_s = 1.5 * (0.009 + 0.001 * num_tokens)
            latency.observe(
                observed(
                    longest=longest, num_tokens=num_tokens, draft=(0.002, 0.0008 * longest),
                    verify=(0.003, step_s),
                )
            )  # fmt: skip
        assert float(latency.draft_s(1, 8)) == pytest.approx(0.002 + 0.0064, rel=0.01)
        assert float(latency.verify_s(1, 40, is_after_drafting=True)) == pytest.approx(
            0.003 + 1.5 * 0.049, rel=0.01
        )

    @pytest.mark.parametrize("longest", [0, 1])
    def test_what_the_router_takes_is_told_apart_by_drafts(self, longest: int) -> None:
        """With drafts there is more to do, without them texts are written during the step."""
        latency = Latency(target_steps=times((1, 1, 0.010)))
        for each in (longest, 1 - longest) * 50:
            rest_s = 0.002 if each else 0.004
            latency.observe(
                observed(
                    longest=each, num_tokens=1, draft=(0.0, 0.001), verify=(0.0015, 0.010),
                    router_s=rest_s - 0.0015,
                )
            )  # fmt: skip
        drafted_s, plain_s = (
            float(latency.verify_s(1, 1, is_after_drafting=is_drafted))
            for is_drafted in (True, False)
        )
        assert drafted_s == pytest.approx(0.012, rel=0.05)
        assert plain_s == pytest.approx(0.014, rel=0.05)

    def test_what_is_not_clean_is_not_learnt(self) -> None:
        latency = Latency(target_steps=times((1, 1, 0.010)))
        before = float(latency.verify_s(1, 1, is_after_drafting=True))
        latency.observe(observed(longest=1, num_tokens=2, draft=(0.0, 0.001), verify=None))
        assert float(latency.verify_s(1, 1, is_after_drafting=True)) == before

    @pytest.mark.parametrize("factor", [0.5, 2.0])
    def test_what_is_not_seen_becomes_slower_and_faster_with_what_is(self, factor: float) -> None:
        latency = Latency(target_steps=times((1, 1, 0.010)))
        for longest in (0, 1) * 30:
            latency.observe(
                observed(longest=longest, num_tokens=1, draft=(0.0, 0.001), verify=(0.001, 0.01))
            )
        for _ in range(200):
            latency.observe(
                observed(longest=0, num_tokens=1, draft=(0.0, 0.0), verify=(0.001, 0.01 * factor))
            )
        drafted = float(latency.verify_s(1, 1, is_after_drafting=True))
        assert drafted == pytest.approx(0.001 + 0.01 * factor, rel=0.3)

    def test_drafts_that_were_never_seen_clean_are_no_faster_for_that(self) -> None:
        """As beside prompts, or while drafters go on: the table alone would make them cheap."""
        latency = Latency(target_steps=times((1, 1, 0.010)))
        plain = observed(longest=0, num_tokens=1, draft=(0.0, 0.0), verify=(0.001, 0.03))
        for _ in range(100):
            latency.observe(plain)
        drafted_s = float(latency.verify_s(1, 1, is_after_drafting=True))
        assert drafted_s == float(latency.verify_s(1, 1, is_after_drafting=False))
        assert drafted_s == pytest.approx(0.031, rel=0.05)
        clean = observed(longest=1, num_tokens=1, draft=(0.0, 0.001), verify=(0.001, 0.02))
        for _ in range(10):
            latency.observe(clean)
        drafted_s = float(latency.verify_s(1, 1, is_after_drafting=True))
        assert drafted_s == pytest.approx(0.021, rel=0.05)

    @pytest.mark.parametrize("more", [0.1, 10.0])
    def test_what_is_learnt_of_drafts_says_little_of_plain_steps(self, more: float) -> None:
        """Plain ones are well known, drafts are tried now and then, and cost more or less."""
        latency = Latency(target_steps=times((1, 1, 0.010)))
        plain = observed(longest=0, num_tokens=1, draft=(0.0, 0.0), verify=(0.001, 0.03))
        drafted = observed(longest=1, num_tokens=1, draft=(0.0, 0.001), verify=(0.001, 0.03 * more))
        for _ in range(100):
            latency.observe(plain)
        for _ in range(8):
            latency.observe(drafted)
        plain_s = float(latency.verify_s(1, 1, is_after_drafting=False))
        assert plain_s == pytest.approx(0.031, rel=0.5)
