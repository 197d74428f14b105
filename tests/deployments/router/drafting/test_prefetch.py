"""Drafting ahead: the policy against simulated machines, and what the loop makes of its drafts."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from deployments.router.drafting.overlap import TRY_EVERY, MeasuredOverlap, make_overlap
from deployments.router.policy.gamma import Candidate, Decision, FixedGamma, ObservedRound, Reason
from tests.deployments.loops import (
    CACHE,
    GREEDY,
    NUM_TOKENS,
    SAMPLED,
    Models,
    make_params,
    run_all,
    running_loop,
    wait_until,
)
from tests.fakes import LocalWorkers
from workers.drafters.model import ModelDrafter
from workers.sampling_params import SamplingParams


def share_overlapped(
    *,
    slowdown: float,
    hit_rate: float,
    num_rounds: int = 600,
    overlap: MeasuredOverlap | None = None,
) -> float:
    """The share of later rounds that overlap where a verification takes 30 ms and drafting 5."""
    overlap, rng = overlap or MeasuredOverlap(), random.Random(0)
    was_overlapped, num_overlapped = False, 0
    for index in range(num_rounds):
        is_overlapped = overlap.choose()
        is_hit = was_overlapped and rng.random() < hit_rate
        draft_s = 0.0 if is_hit else 0.005 * rng.uniform(0.8, 1.2)
        verify_s = 0.030 * (1 + slowdown * is_overlapped) * rng.uniform(0.95, 1.05)
        overlap.observe(
            ObservedRound(
                reason=Reason.FIXED,
                outcomes=(),
                num_sequences=1,
                num_drafted=1,
                longest_draft=4,
                num_tokens=5,
                num_committed=1,
                draft_s=None if was_overlapped else draft_s,
                draft_compute_s=0.6 * draft_s,
                draft_further_s=0.3 * draft_s,
                verify_s=None if is_overlapped else verify_s,
                verify_compute_s=0.9 * verify_s,
                router_s=0.0,
                round_s=draft_s + verify_s,
                is_overlapped=is_overlapped,
                is_after_overlap=was_overlapped,
            )
        )
        num_overlapped += is_overlapped and index >= num_rounds // 2
        was_overlapped = is_overlapped
    return num_overlapped / (num_rounds - num_rounds // 2)


class TestPolicy:
    def test_it_stays_on_where_it_is_free(self) -> None:
        assert share_overlapped(slowdown=0.0, hit_rate=0.4) > 0.8

    def test_it_stays_off_where_cores_are_shared(self) -> None:
        assert 0 < share_overlapped(slowdown=0.15, hit_rate=0.4) < 0.05

    @pytest.mark.parametrize(("before", "after"), [(0.15, 0.0), (0.0, 0.15)])
    def test_it_follows_a_machine_that_changes(self, before: float, after: float) -> None:
        overlap = MeasuredOverlap()
        share_overlapped(slowdown=before, hit_rate=0.4, overlap=overlap)
        share = share_overlapped(slowdown=after, hit_rate=0.4, num_rounds=1200, overlap=overlap)
        assert (share > 0.8) == (after == 0.0)
        assert (share < 0.1) == (after > 0.0)

    def test_it_stays_off_where_it_never_hits(self) -> None:
        assert share_overlapped(slowdown=0.03, hit_rate=0.0) < 0.2

    def test_rounds_without_drafts_are_no_trials(self) -> None:
        overlap = MeasuredOverlap()
        for _ in range(10 * TRY_EVERY):
            overlap.observe(
                ObservedRound(
                    reason=Reason.FIXED, outcomes=(), num_sequences=1, num_drafted=0,
                    longest_draft=0, num_tokens=1, num_committed=1,
                    draft_s=None, draft_compute_s=0.0, draft_further_s=0.0,
                    verify_s=0.03, verify_compute_s=0.03,
                    router_s=0.0,
                    round_s=0.03,
                )
            )  # fmt: skip
        assert not overlap.choose()
        assert not overlap.pays

    @pytest.mark.parametrize("option", ["on", "off"])
    def test_a_fixed_one_never_changes(self, option: str) -> None:
        assert make_overlap(option).choose() == (option == "on")  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_a_drafter_that_is_always_right_is_never_waited_for(
    sampling: SamplingParams, models: Models
) -> None:
    """Once it has begun, all drafts are made ahead."""
    drafts = LocalWorkers(lambda: ModelDrafter(models.target, CACHE, max_batched_tokens=32))
    async with running_loop(models, overlap=True, drafts=drafts) as (loop, targets, observer):
        (stream,) = await run_all(loop, [make_params(3, sampling=sampling)], concurrency=1)
        assert len(stream.token_ids) == NUM_TOKENS
        asked = [request for batch in drafts.calls for request in batch]
        waited_for = [request for request in asked if request.k and not request.assumed_tokens]
        assert len(waited_for) <= 1
        drafted = [record for record in observer.records if record.outcomes]
        assert all(record.is_after_overlap for record in drafted[1:])
        outcomes = [outcome for record in drafted for outcome in record.outcomes]
        assert all(outcome.num_accepted == outcome.num_draft_tokens for outcome in outcomes)
        await wait_until(lambda: drafts.num_used_blocks == targets.num_used_blocks == 0)


async def test_wrong_guesses_are_asked_for_again(models: Models) -> None:
    drafts = LocalWorkers(lambda: ModelDrafter(models.draft, CACHE, max_batched_tokens=32))
    async with running_loop(models, overlap=True, drafts=drafts) as (loop, _, observer):
        await run_all(loop, [make_params(seed) for seed in range(6)], concurrency=3)
        asked = [request for batch in drafts.calls for request in batch if request.k]
        assert any(request.assumed_tokens for request in asked)
        assert any(not request.assumed_tokens for request in asked[10:])
        drafted = [record for record in observer.records if record.outcomes]
        assert {record.is_after_overlap for record in drafted} == {True, False}


class Stopping(FixedGamma):
    """Lets drafters stop where they are unsure."""

    def choose(self, candidates: Sequence[Candidate], *, num_prefill_tokens: int) -> Decision:
        chosen = super().choose(candidates, num_prefill_tokens=num_prefill_tokens)
        return replace(chosen, stop_below=[0.5] * len(candidates))


async def test_drafters_that_go_on_stop_where_they_are_unsure(models: Models) -> None:
    drafts = LocalWorkers(lambda: ModelDrafter(models.draft, CACHE, max_batched_tokens=32))
    async with running_loop(models, overlap=True, drafts=drafts) as (loop, _, _):
        loop.use_gamma(Stopping(4))
        await run_all(loop, [make_params(seed) for seed in range(3)], concurrency=3)
        ahead = [request for batch in drafts.calls for request in batch if request.assumed_tokens]
        assert {request.stop_below for request in ahead} == {0.5}


async def test_a_slow_drafter_does_not_hold_up_the_target(models: Models) -> None:
    """A sequence ends while its drafter goes on, which then forgets it."""
    drafts = LocalWorkers(lambda: ModelDrafter(models.draft, CACHE, max_batched_tokens=32))
    async with running_loop(models, overlap=True, drafts=drafts) as (loop, targets, _):
        drafts.delay_s = 0.05
        params = [make_params(seed, max_tokens=8) for seed in range(4)]
        streams = await run_all(loop, params, concurrency=2)
        assert all(len(stream.token_ids) == 8 for stream in streams)
        await wait_until(lambda: drafts.num_sequences == targets.num_sequences == 0)
