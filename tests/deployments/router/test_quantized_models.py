"""Quantized targets and drafts through the round loop: whoever drafts, drafts change no text."""

from pathlib import Path

import pytest

from tests.deployments.loops import (
    CACHE,
    GREEDY,
    SAMPLED,
    Models,
    make_params,
    model_drafts,
    run_all,
    running_loop,
)
from tests.fakes import LocalWorkers
from tests.tiny_models import save_model
from tests.tokenizers import save_speaking_model
from workers.drafters.model import load_draft_model
from workers.drafters.translated import make_drafter
from workers.model import load_model
from workers.quantization import PACKAGES_OF, Quantization, is_installed
from workers.types import HeterogeneousVocab, Rule
from workers.vocabulary import compare_vocabularies

NUM_TOKENS = 12
"""The tokens of a text, which takes three rounds or more."""
pytestmark = pytest.mark.skipif(
    not all(map(is_installed, PACKAGES_OF.values())), reason="needs torchao and bitsandbytes"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose inputs are whole blocks of 4 bits."""
    wide = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return save_model(tmp_path_factory.mktemp("wide"), "qwen2", **wide)


@pytest.fixture(scope="module")
def pair(folder: str) -> Models:
    """One model twice."""
    return Models(
        target=load_model(folder, dtype="float32", device="cpu", quantization="int8"),
        draft=load_model(folder, dtype="float32", device="cpu", quantization="bnb_nf4"),
    )


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
async def test_texts_are_those_of_plain_decoding(rule: Rule, pair: Models) -> None:
    """Drawn ones too, under the rule that promises it."""
    sampling = SAMPLED if rule == "coupled" else GREEDY
    params = [
        make_params(seed, sampling=sampling, max_tokens=NUM_TOKENS, verification=rule)
        for seed in range(4)
    ]
    async with running_loop(pair, gamma=0) as (loop, _, _):
        plain = await run_all(loop, params, concurrency=1)
    async with running_loop(pair, drafts=model_drafts(pair)) as (loop, _, observer):
        drafted = await run_all(loop, params, concurrency=4)
    assert [stream.token_ids for stream in drafted] == [stream.token_ids for stream in plain]
    outcomes = [outcome for record in observer.records for outcome in record.outcomes]
    assert sum(outcome.num_accepted for outcome in outcomes) > 0


@pytest.mark.parametrize("how", PACKAGES_OF)
async def test_a_quantized_target_drafts_by_its_first_layers(
    how: Quantization, folder: str
) -> None:
    target = load_model(folder, dtype="float32", device="cpu", quantization=how)
    models = Models(target=target, draft=target)
    params = [make_params(seed, max_tokens=NUM_TOKENS) for seed in range(4)]
    async with running_loop(models, gamma=0) as (loop, _, _):
        plain = await run_all(loop, params, concurrency=1)
    async with running_loop(models, drafter="early_exit") as (loop, _, observer):
        drafted = await run_all(loop, params, concurrency=4)
    assert [stream.token_ids for stream in drafted] == [stream.token_ids for stream in plain]
    outcomes = [outcome for record in observer.records for outcome in record.outcomes]
    assert sum(outcome.num_tested for outcome in outcomes) > 0


@pytest.mark.parametrize("method", ["intersection", "retokenize"])
async def test_a_quantized_draft_may_have_another_tokenizer(
    method: HeterogeneousVocab, tmp_path: Path
) -> None:
    target = save_speaking_model(tmp_path / "target", "sentence piece", family=None)
    draft = save_speaking_model(tmp_path / "draft", "byte level", 1, family=None)
    models = Models(
        target=load_model(target, dtype="float32", device="cpu", quantization="int8"),
        draft=load_draft_model(draft, dtype="float32", device="cpu", quantization="bnb_nf4"),
    )
    vocabulary = compare_vocabularies(target, draft, method)
    drafts = LocalWorkers(lambda: make_drafter(models.draft, vocabulary, CACHE, target=target))
    params = [make_params(seed, max_tokens=NUM_TOKENS) for seed in range(4)]
    async with running_loop(models, gamma=0) as (loop, _, _):
        plain = await run_all(loop, params, concurrency=1)
    async with running_loop(models, drafts=drafts) as (loop, _, observer):
        drafted = await run_all(loop, params, concurrency=4)
    assert [stream.token_ids for stream in drafted] == [stream.token_ids for stream in plain]
    outcomes = [outcome for record in observer.records for outcome in record.outcomes]
    assert sum(outcome.num_tested for outcome in outcomes) > 0
