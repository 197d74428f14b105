"""The rules that compare laws, through the round loop: texts have the target's law.

Many seeds of one prompt, on tiny models. Texts are of three tokens only, so that each way in which
three of them follow each other is frequent enough to be counted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from deployments.router.drafting.protocol import sound
from deployments.router.policy.acceptance import AcceptanceBySource
from deployments.router.policy.gamma import Candidate, Outcome
from deployments.router.sequence import GenerationParams
from tests.deployments.loops import Models, model_drafts, run_all, running_loop
from tests.tiny_models import save_model
from workers.model import Model
from workers.sampling import SamplingRow, process_logits
from workers.types import DraftTokens, Rule, SamplingParams

PROMPT = (5, 6, 7)
TEXT_LEN = 6
NUM_TEXTS = 800
LETTERS = (11, 40, 77)
SAMPLED = SamplingParams(
    temperature=3.0,
    presence_penalty=0.3,
    logit_bias=tuple((letter, 90.0) for letter in LETTERS),
)
COUNTED = slice(2, 5)
"""The tokens whose joint law is compared: of two rounds or more."""
RULES: list[Rule] = ["rejection", "block"]


def params_of(rule: Rule, *, seeds: Sequence[int] = range(NUM_TEXTS)) -> list[GenerationParams]:
    return [
        GenerationParams(
            prompt=PROMPT, max_tokens=TEXT_LEN, sampling=SAMPLED, seed=seed, verification=rule
        )
        for seed in seeds
    ]


def law_of_texts(model: Model) -> dict[tuple[int, ...], float]:
    """By transformers' own forward and the definition of the parameters."""
    module = AutoModelForCausalLM.from_pretrained(model.name, dtype=torch.float32).eval()
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for length in range(TEXT_LEN):
        with torch.inference_mode():
            logits = module(torch.tensor([PROMPT + text for text in texts])).logits[:, -1]
        rows = [
            SamplingRow(
                params=SAMPLED,
                seed=0,
                position=len(PROMPT) + length,
                history=PROMPT + text,
                prompt_len=len(PROMPT),
            )
            for text in texts
        ]
        law = process_logits(logits, rows).double().softmax(-1)
        texts = {
            (*text, letter): probability * float(row[letter])
            for (text, probability), row in zip(texts.items(), law, strict=True)
            for letter in LETTERS
        }
    return texts


def pvalue(texts: Sequence[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """The p-value of a chi-square test of the counted tokens, as they follow each other."""
    counts = Counter(text[COUNTED] for text in texts)
    expected: Counter[tuple[int, ...]] = Counter()
    for text, probability in law.items():
        expected[text[COUNTED]] += probability * len(texts)
    assert len(expected) == 27
    assert min(expected.values()) > 5
    return float(chisquare([counts[way] for way in expected], list(expected.values())).pvalue)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A draft that is often wrong."""
    return Models.load(save_model(tmp_path_factory.mktemp("pair")), noise=0.3)


@pytest.mark.parametrize(
    ("rule", "gamma", "overlap"),
    [("rejection", 2, True), ("block", 3, True), ("rejection", "dynamic", False)],
)
async def test_texts_have_the_targets_law(
    rule: Rule, gamma: Any, overlap: bool, pair: Models
) -> None:
    drafts = model_drafts(pair)
    async with running_loop(pair, gamma=gamma, overlap=overlap, drafts=drafts) as (
        loop,
        _,
        observer,
    ):
        streams = await run_all(loop, params_of(rule), concurrency=32)
    texts = [tuple(stream.token_ids) for stream in streams]
    assert pvalue(texts, law_of_texts(pair.target)) > 1e-3
    outcomes = [outcome for record in observer.records for outcome in record.outcomes]
    num_accepted = sum(outcome.num_accepted for outcome in outcomes)
    assert gamma == "dynamic" or 0 < num_accepted < sum(outcome.num_tested for outcome in outcomes)


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
