"""The round loop over real workers in this process: the same tokens whatever the drafters do."""

from dataclasses import replace
from typing import Literal

import pytest

from deployments.router.sequence import GenerationParams
from tests.deployments.loops import (
    DRAFTERS,
    GREEDY,
    Models,
    make_params,
    model_drafts,
    run_all,
    running_loop,
    wait_until,
)
from tests.fakes import LocalWorkers, ScriptedDrafter
from tests.tiny_configs import VOCAB_SIZE
from workers.paged_model import CacheOptions
from workers.sampling_params import SamplingParams


class TestExactness:
    @pytest.mark.covering(
        gamma=[8, 4, 1, 0, "dynamic"],
        drafter=sorted(DRAFTERS),
        overlap=[True, False],
        concurrency=[16, 1],
    )
    async def test_tokens_do_not_depend_on_drafter_gamma_or_batch(
        self,
        gamma: int | Literal["dynamic"],
        drafter: str,
        overlap: bool,
        concurrency: int,
        models: Models,
        all_params: list[GenerationParams],
        plain: list[list[int]],
    ) -> None:
        """Every third text is written alone, to save time; beside others, all are."""
        some = slice(None, None, 3 if concurrency == 1 else 1)
        drafts = DRAFTERS[drafter](models)
        async with running_loop(models, gamma=gamma, overlap=overlap, drafts=drafts) as (
            loop,
            targets,
            observer,
        ):
            streams = await run_all(loop, all_params[some], concurrency=concurrency)
            assert [stream.token_ids for stream in streams] == plain[some]
            outcomes = [outcome for record in observer.records for outcome in record.outcomes]
            assert bool(outcomes) == (gamma != 0)
            # a dynamic gamma drafts for tiny models as the clock says, at times too rarely to tell
            if drafter == "model" and gamma not in (0, "dynamic"):
                num_tested = sum(outcome.num_tested for outcome in outcomes)
                assert sum(outcome.num_accepted for outcome in outcomes) / num_tested > 0.3
            await wait_until(lambda: targets.num_used_blocks == 0)
            assert loop.num_live == 0
            if isinstance(drafts, LocalWorkers):
                await wait_until(lambda: drafts.num_used_blocks == 0)

    async def test_a_lost_target_changes_nothing(
        self, models: Models, all_params: list[GenerationParams], plain: list[list[int]]
    ) -> None:
        drafts = model_drafts(models)
        async with running_loop(models, drafts=drafts, num_targets=2) as (loop, targets, _):
            lost = []

            def lose_targets() -> None:
                # 16 texts have a call each for their prompts, and those of 40 tokens that run in
                # two lots of eight at least 14 more, with 5 tokens at most from each
                if len(targets.calls) in (15, 30):
                    targets.kill(lost_id := next(iter(targets.replicas)))
                    lost.append(lost_id)
                    targets.start_replica()

            targets.before_call = lose_targets
            streams = await run_all(loop, all_params, concurrency=8)
            assert [stream.token_ids for stream in streams] == plain
            assert len(lost) == 2
            await wait_until(lambda: targets.num_used_blocks == 0)

    async def test_a_cache_too_small_for_all_changes_nothing(
        self, models: Models, all_params: list[GenerationParams], plain: list[list[int]]
    ) -> None:
        cache = CacheOptions(block_size=4, max_num_seqs=1, max_model_len=104)
        drafts = model_drafts(models)
        async with running_loop(models, drafts=drafts, cache=cache) as (loop, targets, observer):
            streams = await run_all(loop, all_params, concurrency=16)
            assert [stream.token_ids for stream in streams] == plain
            await wait_until(lambda: targets.num_used_blocks == 0)
            # drafts that there was no room for were not tested, and say nothing
            outcomes = [o for record in observer.records for o in record.outcomes]
            assert min(o.num_tested for o in outcomes) > 0

    async def test_rounds_that_cannot_be_recorded_are_committed(
        self,
        models: Models,
        all_params: list[GenerationParams],
        plain: list[list[int]],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        drafts = model_drafts(models)
        async with running_loop(models, drafts=drafts) as (loop, _, observer):
            observer.error = ValueError("no such metric")
            streams = await run_all(loop, all_params, concurrency=4)
            assert [stream.token_ids for stream in streams] == plain
        assert "no such metric" in caplog.text

    @pytest.mark.parametrize("ends", [True, False])
    async def test_what_no_token_may_follow_is_written_first(
        self, ends: bool, models: Models
    ) -> None:
        """Behind its fifth token all are banned, which matters unless the text ends with that."""
        params = make_params(1, sampling=GREEDY, max_tokens=8)
        async with running_loop(models, gamma=0) as (loop, _, _):
            (whole,) = await run_all(loop, [params], concurrency=1)
        text = whole.token_ids
        sampling = SamplingParams(
            temperature=0.0,
            bad_words=tuple((*text[2:5], token) for token in range(VOCAB_SIZE)),
            stop_token_ids=(text[4],) if ends else (),
        )
        drafts = ScriptedDrafter(
            lambda asked: text[asked.base_len + len(asked.new_tokens) - asked.prompt_len :][
                : asked.k
            ]
        )
        params = replace(params, sampling=sampling)
        async with running_loop(models, drafts=drafts, gamma=8) as (loop, _, observer):
            (stream,) = await run_all(loop, [params], concurrency=1)
        assert stream.token_ids == text[:5]
        assert (stream.error is None) == ends
        assert ends or "no token is allowed at position" in str(stream.error)
        outcomes = [outcome for record in observer.records for outcome in record.outcomes]
        assert sum(outcome.num_accepted for outcome in outcomes) > 0
