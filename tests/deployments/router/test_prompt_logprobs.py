"""A prompt's log-probabilities come whole, whatever happens to the workers that make them."""

from dataclasses import replace

import pytest

from deployments.router.sequence import Delta, GenerationParams, ShownPrompt
from tests.deployments.loops import (
    GREEDY,
    SAMPLED,
    Models,
    make_params,
    model_drafts,
    run_all,
    running_loop,
    wait_until,
)
from tests.fakes import LocalWorkers
from workers import target as target_module
from workers.paged_model import CacheOptions
from workers.target import Target

NUM_TOP = 2


@pytest.fixture(scope="module")
def all_params() -> list[GenerationParams]:
    return [
        replace(params, shown_prompt=ShownPrompt(params.prompt))
        for params in (
            make_params(
                seed,
                sampling=GREEDY if seed % 2 else SAMPLED,
                max_tokens=6,
                num_logprobs=NUM_TOP,
                num_prompt_logprobs=NUM_TOP,
            )
            for seed in range(12)
        )
    ]


def numbers(delta: Delta) -> list[float | None]:
    assert all(record.top_logprobs is not None for record in delta.prompt[1:])
    return [record.logprob for record in (*delta.prompt, *delta.records)]


async def expected(models: Models, all_params: list[GenerationParams]) -> list[Delta]:
    """Each alone, without drafts."""
    async with running_loop(models, gamma=0) as (loop, _, _):
        streams = await run_all(loop, all_params, concurrency=1)
    return [Delta.join(stream.deltas) for stream in streams]


def assert_same(found: list[Delta], truth: list[Delta], all_params: list[GenerationParams]) -> None:
    for one, other, params in zip(found, truth, all_params, strict=True):
        assert one.token_ids == other.token_ids
        assert [record.token_id for record in one.prompt] == list(params.prompt)
        assert numbers(one)[0] is numbers(other)[0] is None
        assert numbers(one)[1:] == pytest.approx(numbers(other)[1:], abs=1e-4)


async def test_lost_targets_change_nothing(
    models: Models, all_params: list[GenerationParams]
) -> None:
    truth = await expected(models, all_params)
    async with running_loop(models, drafts=model_drafts(models), num_targets=2) as (
        loop,
        targets,
        _,
    ):
        num_lost = 0

        def lose_targets() -> None:
            nonlocal num_lost
            if len(targets.calls) in (3, 9, 20):
                targets.kill(next(iter(targets.replicas)))
                targets.start_replica()
                num_lost += 1

        targets.before_call = lose_targets
        streams = await run_all(loop, all_params, concurrency=6)
        assert num_lost == 3
        assert_same([Delta.join(stream.deltas) for stream in streams], truth, all_params)
        await wait_until(lambda: targets.num_used_blocks == 0)


async def test_completions_of_one_prompt_share_its_records(
    models: Models, all_params: list[GenerationParams]
) -> None:
    both = [all_params[0], replace(all_params[0], seed=100)]
    async with running_loop(models, gamma=0) as (loop, _, _):
        first, second = [stream.deltas[0] for stream in await run_all(loop, both, concurrency=1)]
    assert len(first.prompt) == len(both[0].prompt)
    assert first.prompt is second.prompt


async def test_a_cache_too_small_for_all_changes_nothing(
    models: Models, all_params: list[GenerationParams]
) -> None:
    truth = await expected(models, all_params)
    cache = CacheOptions(block_size=4, max_num_seqs=1, max_model_len=80)
    async with running_loop(models, drafts=model_drafts(models), cache=cache) as (loop, _, _):
        streams = await run_all(loop, all_params, concurrency=12)
        assert_same([Delta.join(stream.deltas) for stream in streams], truth, all_params)


async def test_a_long_prompt_is_answered_in_parts(
    models: Models, all_params: list[GenerationParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = await expected(models, all_params)
    monkeypatch.setattr(target_module, "MAX_LOGPROBS_AT_ONCE", 20)
    targets = LocalWorkers(lambda: Target(models.target, max_batched_tokens=16))
    async with running_loop(models, gamma=0, targets=targets) as (loop, _, _):
        streams = await run_all(loop, all_params, concurrency=4)
        assert_same([Delta.join(stream.deltas) for stream in streams], truth, all_params)
        prefills = [r for call in targets.calls for r in call if r.num_prompt_logprobs is not None]
        assert len(prefills) > len(all_params)
        assert any(request.base_len > 0 for request in prefills)
