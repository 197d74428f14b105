"""Completions that have to match a grammar: the same whatever drafts, and never anything else."""

import asyncio
import dataclasses
import random
from typing import Literal

import pytest

from deployments.router.drafting.forced import ForcedTokens
from deployments.router.drafting.protocol import Drafter
from deployments.router.sequence import GenerationParams
from tests.deployments.loops import (
    DRAFTERS,
    GREEDY,
    NUM_TOKENS,
    SAMPLED,
    Models,
    Stream,
    drafters_of,
    make_params,
    model_drafts,
    run_all,
    running_loop,
    wait_until,
)
from tests.fakes import LocalWorkers, ScriptedDrafter
from tests.grammars import END_TOKEN, GRAMMARS, VOCAB_SIZE, compiling_held, save_grammar_model
from tests.workers.test_grammar import ids, make_compiler
from workers import grammar_matcher
from workers.grammar import Grammar
from workers.paged_model import CacheOptions
from workers.sampling_params import SamplingParams
from workers.types import ProposeRequest

MAX_TOKENS = 48
THINKING = Grammar.json_schema({"enum": ["a", "b"]}, starts_after="e")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models.load(save_grammar_model(tmp_path_factory.mktemp("pair"), family=None))


@pytest.fixture(scope="module")
def all_params() -> list[GenerationParams]:
    grammars = [*GRAMMARS.values(), THINKING]
    samplings = [GREEDY, SAMPLED, SamplingParams(temperature=0.9, top_p=0.9, presence_penalty=0.5)]
    return [
        make_params(
            seed,
            sampling=dataclasses.replace(
                samplings[seed % 3], grammar=grammars[seed % len(grammars)]
            ),
            max_tokens=MAX_TOKENS,
        )
        for seed in range(2 * len(grammars))
    ]


@pytest.fixture(scope="module")
def plain(models: Models, all_params: list[GenerationParams]) -> list[list[int]]:
    """Each sequence alone, without drafts."""

    async def run() -> list[list[int]]:
        async with running_loop(models, gamma=0) as (loop, _, _):
            streams = await run_all(loop, all_params, concurrency=1, eos_token_ids=(END_TOKEN,))
            return [stream.token_ids for stream in streams]

    return asyncio.run(run())


def test_every_output_matches_its_grammar(
    all_params: list[GenerationParams], plain: list[list[int]]
) -> None:
    compiler = make_compiler()
    num_ended = 0
    for params, output in zip(all_params, plain, strict=True):
        assert params.sampling.grammar is not None
        assert compiler.matcher(params.sampling.grammar).move_to(output)
        num_ended += output[-1] == END_TOKEN
        assert output[-1] == END_TOKEN or len(output) == MAX_TOKENS
    assert num_ended > len(plain) / 2


def make_drafts(
    drafter: str, models: Models
) -> tuple[LocalWorkers | ScriptedDrafter | None, list[Drafter]]:
    """The drafters of that name, and the workers behind them."""
    workers = DRAFTERS[drafter.split(",")[-1]](models) if "model" in drafter else None
    local: list[Drafter] = []
    if "grammar" in drafter:
        local.append(ForcedTokens(make_compiler()))
    names = ",".join(name for name in drafter.split(",") if name != "grammar")
    return workers, local + (drafters_of(names, workers) if names else [])


@pytest.mark.covering(
    drafter=["model", "prompt_lookup", "grammar", "grammar,prompt_lookup,model"],
    gamma=[8, "dynamic", 0],
    overlap=[True, False],
    concurrency=[16, 1],
)
async def test_tokens_do_not_depend_on_drafter_gamma_or_batch(
    drafter: str,
    gamma: int | Literal["dynamic"],
    overlap: bool,
    concurrency: int,
    models: Models,
    all_params: list[GenerationParams],
    plain: list[list[int]],
) -> None:
    """Every fourth text is written alone, to save time; beside others, all are."""
    some = slice(None, None, 4 if concurrency == 1 else 1)
    workers, drafters = make_drafts(drafter, models)
    async with running_loop(
        models, gamma=gamma, overlap=overlap, drafts=workers, drafters=drafters
    ) as (loop, targets, observer):
        streams = await run_all(
            loop, all_params[some], concurrency=concurrency, eos_token_ids=(END_TOKEN,)
        )
        assert [stream.token_ids for stream in streams] == plain[some]
        outcomes = [outcome for record in observer.records for outcome in record.outcomes]
        if gamma == 8:
            assert sum(outcome.num_accepted for outcome in outcomes) > 0
        await wait_until(lambda: targets.num_used_blocks == 0)
        assert loop.num_live == 0


async def test_random_drafts_change_nothing(
    models: Models, all_params: list[GenerationParams], plain: list[list[int]]
) -> None:
    """Nearly all are forbidden, some in the middle of a draft."""
    rng = random.Random(0)
    drafts = ScriptedDrafter(lambda request: rng.choices(range(VOCAB_SIZE), k=request.k))
    async with running_loop(models, gamma=8, drafts=drafts) as (loop, _, _):
        streams = await run_all(loop, all_params, concurrency=8, eos_token_ids=(END_TOKEN,))
        assert [stream.token_ids for stream in streams] == plain


async def test_right_drafts_are_accepted_up_to_the_end(
    models: Models, all_params: list[GenerationParams], plain: list[list[int]]
) -> None:
    """Also where the grammar begins in the middle of a draft."""
    truth = {f"s{params.seed}": output for params, output in zip(all_params, plain, strict=True)}

    def draft(request: ProposeRequest) -> list[int]:
        output_len = request.base_len + len(request.given_tokens) - request.prompt_len
        return truth[request.seq_id][output_len : output_len + request.k]

    async with running_loop(models, gamma=8, drafts=ScriptedDrafter(draft)) as (loop, _, observer):
        streams = await run_all(loop, all_params, concurrency=8, eos_token_ids=(END_TOKEN,))
        assert [stream.token_ids for stream in streams] == plain
        outcomes = [outcome for record in observer.records for outcome in record.outcomes]
        assert all(outcome.num_accepted == outcome.num_draft_tokens for outcome in outcomes)


async def test_a_lost_target_changes_nothing(
    models: Models, all_params: list[GenerationParams], plain: list[list[int]]
) -> None:
    drafts = model_drafts(models)
    async with running_loop(models, drafts=drafts, num_targets=2) as (loop, targets, _):
        lost: list[str] = []

        def lose_targets() -> None:
            if len(targets.calls) in (20, 60) and len(targets.replicas) > 1:
                lost.append(next(iter(targets.replicas)))
                targets.kill(lost[-1])
                targets.start_replica()

        targets.before_call = lose_targets
        streams = await run_all(loop, all_params, concurrency=8, eos_token_ids=(END_TOKEN,))
        assert [stream.token_ids for stream in streams] == plain
        assert lost


async def test_preemption_changes_nothing(
    models: Models, all_params: list[GenerationParams], plain: list[list[int]]
) -> None:
    cache = CacheOptions(block_size=4, max_num_seqs=1, max_model_len=124)
    async with running_loop(models, drafts=model_drafts(models), cache=cache) as (loop, targets, _):
        streams = await run_all(loop, all_params, concurrency=16, eos_token_ids=(END_TOKEN,))
        assert [stream.token_ids for stream in streams] == plain
        assert sum(r.worker.num_preemptions for r in targets.replicas.values()) > 0


async def test_a_grammar_that_is_being_compiled_is_waited_for_in_one_call(
    models: Models, all_params: list[GenerationParams], plain: list[list[int]]
) -> None:
    with compiling_held() as gate:
        async with running_loop(models, gamma=0) as (loop, targets, _):
            running = asyncio.create_task(
                run_all(loop, all_params[:1], concurrency=1, eos_token_ids=(END_TOKEN,))
            )
            await wait_until(lambda: len(targets.calls) > 0)
            await asyncio.sleep(0.2)
            assert len(targets.calls) == 1
            gate.set()
            (stream,) = await running
            assert stream.token_ids == plain[0]


async def test_a_grammar_that_leaves_no_token_ends_its_sequence_alone(models: Models) -> None:
    impossible = Grammar.lark('start: "a" dead\ndead: dead "x"')
    wrong = Grammar.lark("start: nowhere")
    all_params = [
        make_params(1, sampling=dataclasses.replace(SAMPLED, grammar=impossible)),
        make_params(2, sampling=dataclasses.replace(GREEDY, grammar=wrong)),
        make_params(3),
    ]
    async with running_loop(models, drafts=model_drafts(models)) as (loop, targets, _):
        streams = await run_all(loop, all_params, concurrency=3)
        assert "grammar" in str(streams[0].error)
        assert "nowhere" in str(streams[1].error)
        assert streams[2].error is None
        assert len(streams[2].token_ids) == NUM_TOKENS
        await wait_until(lambda: targets.num_used_blocks == 0)


def test_a_text_that_was_matched_elsewhere_is_matched_a_little_at_a_time() -> None:
    """Nothing else runs meanwhile."""
    compiler = make_compiler()
    grammar = Grammar.regex("(ab){70}-the end")
    compiler.compile(grammar).result()
    params = make_params(1, sampling=dataclasses.replace(GREEDY, grammar=grammar), max_tokens=999)
    drafter, sequence = ForcedTokens(compiler), Stream(params).sequence
    sequence.tokens += ids("ab" * 70)
    assert [drafter.draft(sequence, 8).tokens for _ in range(2)] == [(), ()]
    assert drafter.draft(sequence, 8).tokens == tuple(ids("-the end"))


def test_a_text_that_cannot_be_followed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, grammar = make_compiler(), Grammar.regex("ab-the end")
    compiler.compile(grammar).result()
    params = make_params(1, sampling=dataclasses.replace(GREEDY, grammar=grammar))
    drafter, sequence = ForcedTokens(compiler), Stream(params).sequence
    assert drafter.draft(sequence, 8).tokens
    with monkeypatch.context() as patch:
        patch.setattr(grammar_matcher, "MOST_MATCHING_S", -1.0)
        sequence.tokens += ids("a")
        assert not drafter.draft(sequence, 8).tokens
    sequence.tokens += ids("b")
    assert not drafter.draft(sequence, 8).tokens
    assert len(drafter) == 1
    drafter.forget(sequence)
    assert len(drafter) == 0
