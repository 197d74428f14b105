"""The rules that compare laws, through the round loop: texts have the target's law.

Many seeds of one prompt, on tiny models.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.router.drafting.protocol import sound
from deployments.router.policy.acceptance import AcceptanceBySource
from deployments.router.policy.gamma import Candidate, Outcome
from deployments.router.sequence import GenerationParams
from tests.deployments.loops import CACHE, Models, load_noisy, model_drafts, run_all, running_loop
from tests.fakes import LocalWorkers
from tests.laws import TEXT_LEN, law_of_texts, only, pvalue
from tests.tiny_models import save_quick_model
from tests.tokenizers import save_permuted, save_speaking_model
from workers.drafters.translated import make_drafter
from workers.sampling_params import SamplingParams
from workers.types import DraftTokens, HeterogeneousVocab, Rule
from workers.vocabulary import compare_vocabularies

PROMPT = (5, 6, 7)
NUM_TEXTS = 300
"""A rule that draws what it rejects from the target's whole law is found, of a draft this wrong."""
SAMPLED = only((11, 40, 77))
OTHERS = only((30, 60, 90))
"""As likely, of the model with a tokenizer."""
RULES: list[Rule] = ["rejection", "block"]


def params_of(rule: Rule, sampling: SamplingParams) -> list[GenerationParams]:
    return [
        GenerationParams(
            prompt=PROMPT, max_tokens=TEXT_LEN, sampling=sampling, seed=seed, verification=rule
        )
        for seed in range(NUM_TEXTS)
    ]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A draft that is often wrong, so that few texts tell."""
    return Models.load(save_quick_model(tmp_path_factory.mktemp("pair")), noise=4.0)


async def check_law(
    models: Models,
    drafts: LocalWorkers,
    rule: Rule,
    *,
    sampling: SamplingParams = SAMPLED,
    gamma: Any,
    overlap: bool,
) -> None:
    """Texts have the target's law, and of drafts with a fixed gamma some are right, some wrong."""
    async with running_loop(models, gamma=gamma, overlap=overlap, drafts=drafts) as (
        loop,
        _,
        observer,
    ):
        streams = await run_all(loop, params_of(rule, sampling), concurrency=100)
    texts = [tuple(stream.token_ids) for stream in streams]
    assert pvalue(texts, law_of_texts(models.target.name, PROMPT, sampling)) > 1e-3
    outcomes = [outcome for record in observer.records for outcome in record.outcomes]
    num_accepted = sum(outcome.num_accepted for outcome in outcomes)
    assert gamma == "dynamic" or 0 < num_accepted < sum(outcome.num_tested for outcome in outcomes)


@pytest.mark.parametrize(
    ("rule", "gamma", "overlap"),
    [("rejection", 2, True), ("block", 3, True), ("rejection", "dynamic", False)],
)
async def test_texts_have_the_targets_law(
    rule: Rule, gamma: Any, overlap: bool, pair: Models
) -> None:
    await check_law(pair, model_drafts(pair), rule, gamma=gamma, overlap=overlap)


@pytest.mark.parametrize(
    ("rule", "method"),
    [("rejection", "intersection"), ("block", "retokenize")],
)
async def test_so_have_those_with_drafts_of_another_tokenizer(
    rule: Rule, method: HeterogeneousVocab, tmp_path: Path
) -> None:
    """One text has one cut: none of the three tokens makes a longer one with the others."""
    models = Models.load(save_speaking_model(tmp_path / "target", "byte level", family=None))
    draft = load_noisy(save_permuted(models.target.name, tmp_path / "draft"), noise=4.0)
    vocabulary = compare_vocabularies(models.target.name, draft.name, method)
    drafts = LocalWorkers(lambda: make_drafter(draft, vocabulary, CACHE, target=models.target.name))
    await check_law(models, drafts, rule, sampling=OTHERS, gamma=3, overlap=True)


def test_drafts_that_were_drawn_have_no_confidences() -> None:
    """Nothing may decide by them how many drafts are verified."""
    drawn = DraftTokens(tokens=(1, 2), confidences=(0.9, 0.1), source="model", law=(b"a", b"b"))
    assert sound(drawn, source="model", max_tokens=8) == replace(drawn, confidences=())
    certain = replace(drawn, law=())
    assert sound(certain, source="model", max_tokens=8) == certain


def test_each_rule_has_an_acceptance_of_its_own() -> None:
    known = AcceptanceBySource()
    outcome = Outcome(
        seq_id="a",
        num_draft_tokens=1,
        num_tested=1,
        num_accepted=1,
        num_committed=2,
        is_sampled=True,
        rule="block",
    )
    for _ in range(100):
        known.of(outcome).observe(outcome)
        known.of(rejected := replace(outcome, num_accepted=0, rule="coupled")).observe(rejected)
    chances = known.foresee(
        [
            Candidate(seq_id=rule, max_gamma=1, is_sampled=True, rule=rule)
            for rule in ("block", "coupled", "rejection")
        ],
        num_samples=1,
        optimism=0.0,
    )[:, 0, 0]
    assert chances[0] > 0.9 > 0.8 > chances[2] > 0.6 > 0.1 > chances[1]
