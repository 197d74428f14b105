"""Draft models with another tokenizer: the laws of what they draw."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.goodness_of_fit import chisquare_pvalue
from tests.tokenizers import wrapped
from tests.workers.decoding import CACHE, SAMPLED
from tests.workers.translating import drafter_of, encode, load, propose, request
from workers import streams
from workers.draft_law import read_law
from workers.drafters import draws
from workers.drafters.model import ModelDrafter
from workers.types import ProposeResult, Rule

RULES: list[Rule] = ["rejection", "block"]


def draw(
    drafter: ModelDrafter, tokens: Sequence[int], rule: Rule, seed: int, k: int = 3
) -> ProposeResult:
    """Drafts under a rule, of a sequence that is new to the drafter."""
    asked = request(tokens, k=k, sampling=SAMPLED)
    (result,) = drafter.propose([dataclasses.replace(asked, verification=rule, seed=seed)])
    drafter.release([asked.seq_id])
    return result


@pytest.mark.parametrize("rule", RULES)
def test_a_permuted_vocabulary_draws_as_the_original(
    rule: Rule, model_names: dict[str, str]
) -> None:
    """The same tokens of the same laws."""
    original = ModelDrafter(load(model_names["byte level"]), CACHE)
    permuted = drafter_of(model_names, "byte level", "permuted byte level", "intersection")
    tokens = encode("byte level")[:9]
    for seed in range(20):
        ours, theirs = (draw(drafter, tokens, rule, seed) for drafter in (original, permuted))
        assert theirs.draft_tokens == ours.draft_tokens
        assert theirs.confidences == ()
        for of_ours, of_theirs, token in zip(ours.law, theirs.law, ours.draft_tokens, strict=True):
            assert law_of(of_theirs, token) == pytest.approx(law_of(of_ours, token), abs=1e-4)


def law_of(packed: bytes, token: int) -> dict[int, float]:
    """The probabilities of the tokens of a law, but for the rarest, which may just miss a law."""
    law = read_law(packed, token)
    likely = zip(law.tokens.tolist(), law.probabilities.tolist(), strict=True)
    return {token: probability for token, probability in likely if probability > 1e-3}


def test_the_law_of_an_intersection_is_that_of_the_tokens_that_both_have(
    model_names: dict[str, str],
) -> None:
    """By transformers' own forward of the draft, and what is drawn has it."""
    drafter = drafter_of(model_names, "byte level", "sentence piece", "intersection")
    tokens = encode("byte level", "f/%2")  # each of them is one of the draft's too
    drawn = [draw(drafter, tokens, "rejection", seed, 1) for seed in range(400)]
    assert len({result.law[0] for result in drawn}) == 1
    law = read_law(drawn[0].law[0], drawn[0].draft_tokens[0])
    token_map = drafter._translation._map
    context = torch.tensor([[token_map.draft_of[token] for token in tokens]])
    module = AutoModelForCausalLM.from_pretrained(
        model_names["sentence piece"], dtype=torch.float32
    )
    with torch.no_grad():
        logits = module(context).logits[0, -1].double() / SAMPLED.temperature
    scores = {ours: float(logits[theirs]) for ours, theirs in token_map.draft_of.items()}
    likeliest = sorted(scores, key=lambda token: -scores[token])[: len(law.tokens)]
    assert len(law.tokens) > 20
    assert law.tokens.tolist() == likeliest
    expected = torch.tensor([scores[token] for token in likeliest]).softmax(0).tolist()
    assert law.probabilities.tolist() == pytest.approx(expected, abs=1e-4)
    counts = Counter(result.draft_tokens[0] for result in drawn)
    common = [token for token, p in zip(likeliest, expected, strict=True) if p * 400 >= 5]
    observed = [counts[token] for token in common]
    share = [expected[likeliest.index(token)] for token in common]
    rest = [400 - sum(observed)], [(1 - sum(share)) * 400]
    assert chisquare_pvalue([*observed, *rest[0]], [*(p * 400 for p in share), *rest[1]]) > 1e-3


def test_a_cut_without_a_known_law_is_drafted_without_a_choice(model_names: dict[str, str]) -> None:
    """Rules that compare laws then take each draft as certain, which is exact for any that knows
    nothing of their noise: so all seeds have the same drafts, those of temperature 0."""
    drafter = drafter_of(model_names, "byte level", "sentence piece", "retokenize")
    tokens = encode("byte level")
    likeliest = propose(drafter, request(tokens, k=3))
    drafter.release(["s"])
    for seed in range(20):
        for rule in RULES:
            assert draw(drafter, tokens, rule, seed) == likeliest
    assert likeliest.law == ()
    assert len(likeliest.draft_tokens) > 0
    coupled = {draw(drafter, tokens, "coupled", seed).draft_tokens for seed in range(20)}
    assert len(coupled) > 1


def test_a_round_draws_with_noise_of_its_own(
    model_names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds are told apart by the target's tokens: to the draft, one may have added nothing."""
    asked_for = []

    def random_bits(seed: int, position: int, **which: int) -> int:
        asked_for.append((position, which["round_len"]))
        return streams.random_bits(seed, position, **which)

    monkeypatch.setattr(draws, "random_bits", random_bits)
    drafter = drafter_of(model_names, "sentence piece", "byte level", "intersection")
    tokens = encode("sentence piece")
    unsayable = wrapped("sentence piece").unk_token_id
    for base_len, end, assumed in ((0, 5, ()), (5, 6, (unsayable,))):
        given = [*tokens[:5], unsayable][:end]
        asked = request(given, base_len=base_len, k=2, sampling=SAMPLED, assumed=assumed)
        propose(drafter, dataclasses.replace(asked, verification="block"))
    assert asked_for == [(5, 5), (6, 5), (7, 6), (8, 6)]
