"""The model drafter as a worker: what it drafts, how sure it is, and what it keeps."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.goodness_of_fit import chisquare_pvalue
from tests.tiny_configs import VOCAB_SIZE
from tests.tiny_models import save_model
from tests.workers.decoding import CACHE, GREEDY, PENALISED, SAMPLED, generate, make_prompt
from workers.draft_law import read_law
from workers.drafters import model as model_drafter
from workers.drafters.model import ModelDrafter, load_draft_model
from workers.model import Model
from workers.paged_model import CacheOptions
from workers.sampling_params import SamplingParams
from workers.target import Target
from workers.types import ProposeRequest, ProposeResult, Rule


def propose(
    drafter: ModelDrafter, seq_id: str, base_len: int, tokens: Sequence[int], k: int,
    sampling: SamplingParams = GREEDY, stop_below: float = 0.0,
) -> ProposeResult:  # fmt: skip
    (result,) = drafter.propose(
        [
            ProposeRequest(
                seq_id=seq_id,
                base_len=base_len,
                new_tokens=tuple(tokens[base_len:]),
                k=k,
                stop_below=stop_below,
                prompt_len=1,
                sampling=sampling,
                seed=1,
            )
        ]
    )
    drafter.check_integrity()
    assert result.needs_tokens_from is None
    return result


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED])
def test_a_drafter_that_is_the_target_is_always_right(
    sampling: SamplingParams, tiny_model: Callable[..., Model]
) -> None:
    """Also proves the catch-up after full acceptance: a hole in its cache would be seen."""
    model, prompt = tiny_model("llama"), make_prompt(2, 40)
    truth = generate(Target(model, CACHE), prompt, 60, sampling=sampling, seed=1)
    drafter = ModelDrafter(model, CACHE, max_batched_tokens=16)
    tokens, base_len = list(prompt), 0
    for k in (4, 1, 8, 3, 4, 5):
        (result,) = drafter.propose(
            [
                ProposeRequest(
                    seq_id="s",
                    base_len=base_len,
                    new_tokens=tuple(tokens[base_len:]),
                    k=k,
                    prompt_len=40,
                    sampling=sampling,
                    seed=1,
                )
            ]
        )
        done = len(tokens) - 40
        assert list(result.draft_tokens) == truth[done : done + k]
        base_len = len(tokens)
        tokens += truth[done : done + k + 1]
        drafter.check_integrity()


def test_rejections_leave_nothing_behind(tiny_model: Callable[..., Model]) -> None:
    model, prompt = tiny_model("llama"), make_prompt(4, 10)
    drafter = ModelDrafter(model, CACHE)
    first = propose(drafter, "s", 0, prompt, 5).draft_tokens
    committed = [*prompt, first[0], (first[1] + 1) % VOCAB_SIZE]
    second = propose(drafter, "s", len(prompt), committed, 5)
    fresh = propose(ModelDrafter(model, CACHE), "s", 0, committed, 5)
    assert second == fresh


def test_each_sequence_gets_its_own_k_as_if_alone(tiny_model: Callable[..., Model]) -> None:
    model = tiny_model("qwen2")
    prompts = [make_prompt(i, n) for i, n in enumerate([3, 50, 17, 20])]
    ks = [0, 5, 2, 7]
    drafter = ModelDrafter(model, CACHE)
    results = drafter.propose(
        [
            ProposeRequest(
                seq_id=str(i), base_len=0, new_tokens=tuple(p), k=k, prompt_len=1,
                sampling=SAMPLED, seed=1,
            )
            for i, (p, k) in enumerate(zip(prompts, ks, strict=True))
        ]
    )  # fmt: skip
    assert [len(result.draft_tokens) for result in results] == ks
    for prompt, k, result in zip(prompts, ks, results, strict=True):
        alone = propose(ModelDrafter(model, CACHE), "s", 0, prompt, k, SAMPLED)
        # products of other batches differ in their last bits, and so does what is rounded of them
        assert result.confidences == pytest.approx(alone.confidences, abs=2e-5)
        assert result == dataclasses.replace(
            alone, seq_id=result.seq_id, confidences=result.confidences
        )


def test_missing_tokens_are_asked_for(tiny_model: Callable[..., Model]) -> None:
    drafter = ModelDrafter(tiny_model("llama"), CACHE)
    request = ProposeRequest(seq_id="s", base_len=7, new_tokens=(1,), k=2, prompt_len=1)
    (result,) = drafter.propose([request])
    assert result.needs_tokens_from == 0


def test_drafts_stop_where_the_context_ends(tiny_model: Callable[..., Model]) -> None:
    drafter = ModelDrafter(tiny_model("llama"), CacheOptions(block_size=4, max_model_len=16))
    assert len(propose(drafter, "s", 0, make_prompt(0, 13), 8).draft_tokens) == 3


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_drafting_ends_with_the_draft_that_is_not_sure(
    sampling: SamplingParams, tiny_model: Callable[..., Model]
) -> None:
    model, prompt = tiny_model("llama"), make_prompt(3, 20)
    whole = propose(ModelDrafter(model, CACHE), "s", 0, prompt, 8, sampling)
    assert len(whole.confidences) == len(whole.draft_tokens) == 8
    assert all(0.0 < confidence <= 1.0 for confidence in whole.confidences)
    products = [math.prod(whole.confidences[: n + 1]) for n in range(8)]
    for length in (1, 3, 6):
        drafter = ModelDrafter(model, CACHE)
        stop_below = (products[length - 1] + ([1.0, *products])[length - 1]) / 2
        short = propose(drafter, "s", 0, prompt, 8, sampling, stop_below)
        assert short.draft_tokens == whole.draft_tokens[:length]
        assert short.confidences == whole.confidences[:length]
        again = propose(drafter, "s", len(prompt), [*prompt, *short.draft_tokens], 2, sampling)
        assert again.draft_tokens == whole.draft_tokens[length : length + 2]


RATIO_RULES: list[Rule] = ["rejection", "block"]


def draw(
    drafter: ModelDrafter, seed: int, tokens: Sequence[int], k: int, rule: Rule, **changes: object
) -> ProposeResult:
    """Drafts under a rule, of a sequence that is new to the drafter."""
    request = ProposeRequest(
        seq_id=str(seed),
        base_len=0,
        new_tokens=tuple(tokens),
        k=k,
        prompt_len=1,
        sampling=SAMPLED,
        seed=seed,
        verification=rule,
    )
    (result,) = drafter.propose([dataclasses.replace(request, **changes)])
    drafter.release([request.seq_id])
    return result


def test_what_is_drawn_for_a_rule_that_compares_laws_says_its_law_and_no_confidence(
    tiny_model: Callable[..., Model],
) -> None:
    """Under both rules, by turns."""
    drafter, prompt = ModelDrafter(tiny_model("llama"), CACHE), make_prompt(3, 20)
    lengths = [3 if seed < 20 else 1 for seed in range(300)]
    drawn = [
        draw(drafter, seed, prompt, k, RATIO_RULES[seed % 2], stop_below=0.9)
        for seed, k in enumerate(lengths)
    ]
    for k, result in zip(lengths, drawn, strict=True):
        assert len(result.law) == len(result.draft_tokens) == k
        assert result.confidences == ()
    laws = {result.law[0] for result in drawn}
    assert len(laws) == 1
    law = read_law(laws.pop(), drawn[0].draft_tokens[0])
    counts = [sum(r.draft_tokens[0] == token for r in drawn) for token in law.tokens]
    common = law.probabilities * len(drawn) >= 5
    assert sum(counts) == len(drawn)
    observed = [*np.array(counts)[common], np.array(counts)[~common].sum()]
    expected = [*law.probabilities[common], law.probabilities[~common].sum()]
    assert chisquare_pvalue(observed, np.array(expected) * len(drawn)) > 1e-3
    for rule in RATIO_RULES:
        greedy = draw(drafter, 0, prompt, 3, rule, sampling=GREEDY)
        assert greedy.law == ()
        assert len(greedy.confidences) == 3


def test_what_is_drawn_knows_nothing_of_the_targets_noise(tiny_model: Callable[..., Model]) -> None:
    """It agrees with the target's own sample as often as chance has it: sum(q * q)."""
    drafter, prompt = ModelDrafter(tiny_model("llama"), CACHE), make_prompt(3, 20)
    seeds = range(200)
    drawn = [draw(drafter, seed, prompt, 1, "rejection") for seed in seeds]
    coupled = [draw(drafter, seed, prompt, 1, "coupled") for seed in seeds]
    q = read_law(drawn[0].law[0], drawn[0].draft_tokens[0]).probabilities
    expected = float((q * q).sum())
    agreed = sum(a.draft_tokens == b.draft_tokens for a, b in zip(drawn, coupled, strict=True))
    assert abs(agreed / 200 - expected) < 4 * (expected * (1 - expected) / 200) ** 0.5


def test_a_round_draws_with_noise_of_its_own(tiny_model: Callable[..., Model]) -> None:
    """The draws differ at the same position a round later, and are the same for a round that is
    tried again."""
    drafter, prompt = ModelDrafter(tiny_model("llama"), CACHE), make_prompt(3, 20)
    first = [draw(drafter, seed, prompt, 2, "block") for seed in range(30)]
    assert first == [draw(drafter, seed, prompt, 2, "block") for seed in range(30)]
    later = [
        draw(drafter, seed, [*prompt, result.draft_tokens[0]], 1, "block")
        for seed, result in enumerate(first)
    ]
    assert [r.law[1] for r in first] == [r.law[0] for r in later]
    same = sum(a.draft_tokens[1] == b.draft_tokens[0] for a, b in zip(first, later, strict=True))
    assert same < 15


def test_sequences_of_several_rules_are_drafted_together_as_alone(
    tiny_model: Callable[..., Model],
) -> None:
    model, prompt = tiny_model("llama"), make_prompt(3, 20)
    rules: list[Rule] = ["coupled", "block", "rejection", "coupled"]
    batch = [
        ProposeRequest(
            seq_id=str(seed), base_len=0, new_tokens=tuple(prompt), k=3, prompt_len=1,
            sampling=SAMPLED, seed=seed, verification=rule,
        )
        for seed, rule in enumerate(rules)
    ]  # fmt: skip
    drafter = ModelDrafter(model, CACHE)
    assert drafter.propose(batch) == [
        draw(ModelDrafter(model, CACHE), seed, prompt, 3, rule) for seed, rule in enumerate(rules)
    ]


def test_wrong_assumptions_leave_nothing_behind(tiny_model: Callable[..., Model]) -> None:
    """Neither in the sequence, nor in the blocks that others find by their tokens."""
    model, prompt = tiny_model("llama"), make_prompt(6, 10)
    drafter = ModelDrafter(model, CACHE)
    drafts = propose(drafter, "s", 0, prompt, 4).draft_tokens
    request = ProposeRequest(
        seq_id="s", base_len=10, new_tokens=(drafts[0],), assumed_tokens=drafts[1:], k=6,
        prompt_len=1, sampling=GREEDY, seed=1,
    )  # fmt: skip
    (ahead,) = drafter.propose([request])
    assumed = [*prompt, *drafts]
    assert ahead == dataclasses.replace(
        propose(ModelDrafter(model, CACHE), "s", 0, assumed, 6), seq_id="s"
    )
    committed = [*prompt, drafts[0], (drafts[1] + 1) % VOCAB_SIZE]
    fresh = propose(ModelDrafter(model, CACHE), "s", 0, committed, 5)
    assert propose(drafter, "s", 11, committed, 5) == fresh
    for seq_id, tokens in (("as assumed", assumed), ("as committed", committed)):
        alone = propose(ModelDrafter(model, CACHE), seq_id, 0, tokens, 5)
        assert propose(drafter, seq_id, 0, tokens, 5) == alone


def test_a_small_draft_stays_in_bf16_where_our_kernel_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = save_model(tmp_path, dtype="bfloat16")
    for has_streams, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(model_drafter, "has_streams", lambda _, has=has_streams: has)
        assert load_draft_model(name, device="cpu").dtype == dtype
