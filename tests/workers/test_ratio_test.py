"""The rules that compare laws, over logits: what is drawn, and who is judged by what."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.goodness_of_fit import chisquare_pvalue
from workers.draft_law import DraftLaw, draft_laws
from workers.ratio_test import RuleOfEach
from workers.sampling import NO_TOKEN, SamplingRow, law_logits
from workers.sampling_params import SamplingParams
from workers.streams import Stream, random_bits
from workers.types import Rule
from workers.verification import CoupledRule, JudgedRun, Verdict

VOCAB_SIZE = 6
GAMMA = 2
NUM_SEEDS = 3000
PROMPT_LEN = 4
SAMPLED = SamplingParams(temperature=0.8, top_k=5)
RULES: list[Rule] = ["rejection", "block"]


def make_rows(seed: int, params: SamplingParams = SAMPLED, num_rows: int = GAMMA + 1) -> tuple[
    SamplingRow, ...
]:  # fmt: skip
    return tuple(
        SamplingRow(params=params, seed=seed, position=PROMPT_LEN + index)
        for index in range(num_rows)
    )


def make_logits(num_rows: int, seed: int) -> Tensor:
    """The logits behind so many contexts: none, and each first token.  # [num_rows, vocab]"""
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 1.5


class Pair:
    """A target and a drafter whose laws depend on the last token."""

    def __init__(self) -> None:
        self.target = make_logits(1 + VOCAB_SIZE, seed=0)
        self.draft = self.target + make_logits(1 + VOCAB_SIZE, seed=1)
        rows = [make_rows(0, num_rows=1)[0]] * (1 + VOCAB_SIZE)
        self.laws = [law for law in draft_laws(law_logits(self.draft, rows)) if law is not None]
        self.packed = [law.pack() for law in self.laws]
        self.p = law_logits(self.target, rows).double().softmax(-1)

    def run(self, seed: int, rule: Rule) -> tuple[Tensor, JudgedRun]:
        """The target's logits behind drafts that were drawn with the noise of a seed."""
        rows, context, drafts, laws = make_rows(seed), 0, [], []
        contexts = [context]
        for row in rows[:GAMMA]:
            law = self.laws[context]
            bits = random_bits(seed, row.position, stream=Stream.DRAFT, round_len=PROMPT_LEN)
            drafts.append(law.draw(bits))
            laws.append(self.packed[context])
            context = 1 + drafts[-1]
            contexts.append(context)
        run = JudgedRun(draft_tokens=tuple(drafts), rows=rows, rule=rule, draft_laws=tuple(laws))
        return self.target[contexts], run

    def judge(self, rule: Rule, seeds: Sequence[int], device: str = "cpu") -> list[Verdict]:
        logits, runs = zip(*[self.run(seed, rule) for seed in seeds], strict=True)
        return RuleOfEach().judge(torch.cat(logits).to(device), runs)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


@pytest.fixture(scope="module")
def verdicts(pair: Pair) -> dict[Rule, list[Verdict]]:
    return {rule: pair.judge(rule, range(NUM_SEEDS)) for rule in RULES}


@pytest.mark.parametrize("rule", RULES)
def test_the_first_two_tokens_have_the_targets_law(
    rule: Rule, pair: Pair, verdicts: dict[Rule, list[Verdict]]
) -> None:
    observed, expected = [], []
    texts = [verdict.tokens for verdict in verdicts[rule]]
    for first in range(VOCAB_SIZE):
        of_first = [text for text in texts if text[0] == first]
        observed.append(len(of_first))
        expected.append(float(pair.p[0, first]) * NUM_SEEDS)
    possible = np.array(expected) > 0
    assert np.array(observed)[~possible].sum() == 0
    pvalue = chisquare_pvalue(np.array(observed)[possible], np.array(expected)[possible])
    assert pvalue > 1e-3


def test_drafts_are_accepted_as_far_as_the_laws_overlap(
    pair: Pair, verdicts: dict[Rule, list[Verdict]]
) -> None:
    """The first drafts are accepted with sum(min(p, q)), within four standard deviations."""
    law, p = pair.laws[0], pair.p[0].numpy()
    overlap = np.minimum(p[law.tokens], law.probabilities).sum()
    accepted = sum(verdict.num_accepted >= 1 for verdict in verdicts["rejection"]) / NUM_SEEDS
    assert abs(accepted - overlap) < 4 * (overlap * (1 - overlap) / NUM_SEEDS) ** 0.5


def test_a_block_has_more_accepted_drafts(verdicts: dict[Rule, list[Verdict]]) -> None:
    one_by_one, as_block = (
        sum(verdict.num_accepted for verdict in verdicts[rule]) for rule in RULES
    )
    assert as_block > one_by_one


@pytest.mark.parametrize("rule", RULES)
def test_a_round_that_is_tried_again_decides_the_same_in_any_batch(
    rule: Rule, pair: Pair, verdicts: dict[Rule, list[Verdict]]
) -> None:
    assert pair.judge(rule, range(40, 50)) == verdicts[rule][40:50]


def test_a_round_is_judged_with_noise_of_its_own() -> None:
    """What becomes of a draft says nothing of one in its place a round later."""
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 0] = torch.tensor(5.0).log()  # p is 0.5

    def is_accepted(seed: int, first: int) -> bool:
        """What is decided of a draft at row 1, in a round that begins at row `first`."""
        rows = make_rows(seed, SamplingParams())[first:]
        run = JudgedRun(draft_tokens=(0, 0)[first:], rows=rows, rule="block")
        (verdict,) = RuleOfEach().judge(logits.expand(len(rows), -1), [run])
        return verdict.num_accepted == len(run.draft_tokens)

    seeds = [seed for seed in range(600) if is_accepted(seed, 0)]
    assert len(seeds) > 100
    share = sum(is_accepted(seed, 1) for seed in seeds) / len(seeds)
    assert abs(share - 0.5) < 4 * 0.5 / len(seeds) ** 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
def test_decisions_are_the_same_on_cuda(
    rule: Rule, pair: Pair, verdicts: dict[Rule, list[Verdict]]
) -> None:
    assert pair.judge(rule, range(200), device="cuda") == verdicts[rule][:200]


def test_what_was_tested_is_what_was_accepted_and_the_next(
    verdicts: dict[Rule, list[Verdict]],
) -> None:
    for verdict in verdicts["block"] + verdicts["rejection"]:
        assert verdict.num_tested == min(verdict.num_accepted + 1, GAMMA)
        assert len(verdict.tokens) == verdict.num_accepted + 1


def test_runs_of_a_batch_have_each_their_rule(pair: Pair) -> None:
    rules: list[Rule] = ["block", "coupled", "rejection", "coupled", "block", "rejection"] * 4
    logits, runs = zip(*[pair.run(seed, rule) for seed, rule in enumerate(rules)], strict=True)
    together = RuleOfEach().judge(torch.cat(logits), runs)
    alone = [RuleOfEach().judge(of_run, [run])[0] for of_run, run in zip(logits, runs, strict=True)]
    assert together == alone
    of_coupled = [
        CoupledRule().judge(of_run, [run])[0]
        for of_run, run in zip(logits, runs, strict=True)
        if run.rule == "coupled"
    ]
    assert [v for v, rule in zip(together, rules, strict=True) if rule == "coupled"] == of_coupled


@pytest.mark.parametrize("rule", RULES)
def test_without_drafts_the_token_is_the_targets_own_sample(rule: Rule, pair: Pair) -> None:
    logits = pair.target[:1]
    runs = [JudgedRun(draft_tokens=(), rows=make_rows(seed, num_rows=1)) for seed in range(50)]
    coupled = CoupledRule().judge(logits.expand(50, -1), runs)
    ratio = [JudgedRun(draft_tokens=(), rows=run.rows, rule=rule) for run in runs]
    assert RuleOfEach().judge(logits.expand(50, -1), ratio) == coupled


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("token", [VOCAB_SIZE, -1])
def test_a_token_that_the_target_does_not_know_is_rejected(
    rule: Rule, token: int, pair: Pair
) -> None:
    """The token in its place has the law max(p - q, 0), of which a law with it leaves more."""
    law = DraftLaw(tokens=np.array([token, 2]), weights=np.array([1, 1]))
    p = pair.p[0].numpy()
    left = p - 0.5 * (np.arange(VOCAB_SIZE) == 2)
    left = np.maximum(left, 0) / np.maximum(left, 0).sum()
    runs = [
        JudgedRun(
            draft_tokens=(token, 3),
            rows=make_rows(seed),
            rule=rule,
            draft_laws=(law.pack() if token > 0 else b"", b""),
        )
        for seed in range(1000)
    ]
    verdicts = RuleOfEach().judge(pair.target[:1].expand(3000, -1), runs)
    assert {verdict.num_accepted for verdict in verdicts} == {0}
    observed = np.bincount([verdict.tokens[0] for verdict in verdicts], minlength=VOCAB_SIZE)
    expected = (left if token > 0 else p) * 1000
    assert observed[expected == 0].sum() == 0
    assert chisquare_pvalue(observed[expected > 0], expected[expected > 0]) > 1e-3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fault", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("row", range(GAMMA + 1))
def test_scores_that_decide_no_token_end_there(
    rule: Rule, fault: float, row: int, pair: Pair
) -> None:
    ends = 0
    for seed in range(30):
        logits, run = pair.run(seed, rule)
        logits[row] = fault
        (verdict,) = RuleOfEach().judge(logits, [run])
        assert verdict.num_accepted <= row
        assert (verdict.tokens[-1] == NO_TOKEN) == (verdict.num_accepted == row)
        ends += verdict.num_accepted == row
    assert row == 2 or ends > 0
