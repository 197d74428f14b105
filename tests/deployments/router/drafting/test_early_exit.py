"""Early exit in the round loop: drafts are asked for a round ahead, and change no text."""

import random
from dataclasses import replace

from deployments.router.drafting.early_exit import EarlyExit
from deployments.router.policy.gamma import Decision, Reason
from deployments.router.sequence import GenerationParams
from tests.deployments.loops import (
    EARLY_EXIT_LAYER,
    Models,
    Stream,
    make_params,
    model_drafts,
    run_all,
    running_loop,
    wait_until,
)
from tests.fakes import LocalWorkers
from workers.paged_model import CacheOptions
from workers.target import Target
from workers.types import NO_DRAFTS, DraftTokens

DECISION = Decision(gammas=[4], stop_below=[0.0], reason=Reason.BEST)


class TestLoop:
    async def test_a_dynamic_gamma_learns_what_the_targets_drafts_cost(
        self, models: Models, all_params: list[GenerationParams], plain: list[list[int]]
    ) -> None:
        async with running_loop(models, gamma="dynamic", drafter="early_exit") as (loop, _, seen):
            streams = await run_all(loop, all_params, concurrency=4)
            assert [stream.token_ids for stream in streams] == plain
        asked = [record for record in seen.records if record.num_ahead]
        known = [record for record in asked if record.ahead_s is not None]
        assert known
        for record in known:
            assert 0.0 < record.ahead_s <= record.times.draft_s
            assert record.verify_compute_s > 0.0
        assert {o.source for record in seen.records for o in record.outcomes} == {"early_exit"}

    async def test_requests_choose_it_or_another(
        self, models: Models, all_params: list[GenerationParams], plain: list[list[int]]
    ) -> None:
        """In one batch: none, the target, the draft model, or whoever comes first."""
        choices: list[tuple[str | None, int | None]] = [
            ("early_exit", None), ("model", None), (None, 0), (None, None), ("early_exit", 1)
        ]  # fmt: skip
        asking = [
            replace(params, drafter=drafter, max_gamma=max_gamma)
            for index, params in enumerate(all_params)
            for drafter, max_gamma in [choices[index % len(choices)]]
        ]
        drafts = model_drafts(models)
        async with running_loop(
            models, drafts=drafts, drafter="model,prompt_lookup,early_exit"
        ) as (loop, targets, seen):
            streams = await run_all(loop, asking, concurrency=16)
            assert [stream.token_ids for stream in streams] == plain
            await wait_until(lambda: targets.num_used_blocks + drafts.num_used_blocks == 0)
        outcomes = [outcome for record in seen.records for outcome in record.outcomes]
        for stream in streams:
            params = stream.sequence.params
            sources = {o.source for o in outcomes if o.seq_id == stream.sequence.seq_id}
            if params.max_gamma == 0:
                assert not sources
            elif params.drafter is not None:
                assert sources == {params.drafter}

    async def test_nothing_is_asked_for_before_the_first_token_or_past_the_last(
        self, models: Models
    ) -> None:
        params = make_params(3, max_tokens=9)
        async with running_loop(models, gamma=4, drafter="early_exit") as (loop, targets, _):
            (stream,) = await run_all(loop, [params], concurrency=1)
        requests = [request for (request,) in targets.calls]
        assert requests[0].base_len == requests[0].next_k == 0
        assert requests[1].next_k == 4
        for request in requests[1:]:
            num_left = len(params.prompt) + 9 - request.base_len - len(request.new_tokens)
            assert request.next_k == min(4, max(0, num_left - 2))
            assert len(request.draft_tokens) <= num_left - 1
        assert len(stream.token_ids) == 9

    async def test_targets_that_die_and_are_full_change_nothing(
        self, models: Models, all_params: list[GenerationParams], plain: list[list[int]]
    ) -> None:
        small = CacheOptions(block_size=4, max_model_len=128, kv_cache_gib=0.0004)
        targets = LocalWorkers(
            lambda: Target(
                models.target, small, max_batched_tokens=32, early_exit_layer=EARLY_EXIT_LAYER
            ),
            num_replicas=2,
        )
        rng = random.Random(1)

        def live_or_die() -> None:
            if rng.random() < 0.02 and len(targets.replicas) > 1:
                targets.kill(next(iter(targets.replicas)))
                targets.start_replica()

        targets.before_call = live_or_die
        async with running_loop(models, drafter="early_exit", targets=targets) as (loop, _, seen):
            streams = await run_all(loop, all_params, concurrency=16)
            assert [stream.token_ids for stream in streams] == plain
        assert sum(o.num_tested for record in seen.records for o in record.outcomes) > 50


class TestInHand:
    def test_drafts_follow_the_text_that_they_were_made_for(self) -> None:
        early_exit, sequence = EarlyExit(), Stream(make_params(1)).sequence
        early_exit.keep(sequence, DraftTokens(tokens=(5, 6, 7), confidences=(0.5,) * 3), DECISION)
        drafts = early_exit.draft(sequence, 2)
        assert (drafts.tokens, drafts.source) == ((5, 6), "early_exit")
        assert early_exit.draft(sequence, 2) == drafts
        assert early_exit.decision_about(sequence) is DECISION
        sequence.tokens.append(5)
        assert early_exit.draft(sequence, 2) == NO_DRAFTS

    def test_nothing_is_kept_of_a_sequence_that_has_ended(self) -> None:
        early_exit, sequence = EarlyExit(), Stream(make_params(1)).sequence
        early_exit.keep(sequence, DraftTokens(tokens=(5,)), DECISION)
        assert len(early_exit) == 1
        early_exit.forget(sequence)
        sequence.is_cancelled = True
        early_exit.keep(sequence, DraftTokens(tokens=(5,)), DECISION)
        assert len(early_exit) == 0
