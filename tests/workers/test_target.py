"""The target as a worker: exactness, soft state, what a request may ask."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny_configs import VOCAB_SIZE
from tests.tiny_models import save_model, save_tokenizer
from tests.workers.decoding import (
    CACHE,
    GREEDY,
    PENALISED,
    SAMPLED,
    generate,
    knowing_drafts,
    make_prompt,
    random_drafts,
)
from workers.cache_size import GIB
from workers.draft_law import DraftLaw
from workers.errors import ConfigError
from workers.model import Model, load_model
from workers.paged_model import CacheOptions
from workers.sampling_params import SamplingParams
from workers.target import Target
from workers.tokenizer import find_tokenizer
from workers.types import Rule, VerifyRequest, VerifyResult
from workers.verification import CoupledRule, JudgedRun, Verdict


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "T", "penalty"])
def test_text_does_not_depend_on_the_drafts(
    sampling: SamplingParams, tiny_model: Callable[..., Model]
) -> None:
    model, prompt = tiny_model("qwen3"), make_prompt(7, 21)
    plain = generate(Target(model, CACHE), prompt, 20, sampling=sampling)
    assert len(set(plain)) > 5
    for gamma in (1, 4, 8):
        for drafts in (
            random_drafts(gamma),
            knowing_drafts(plain, len(prompt), gamma, wrong_every=3),
            knowing_drafts(plain, len(prompt), gamma, wrong_every=10**6),
        ):
            target = Target(model, CACHE)
            assert generate(target, prompt, 20, sampling=sampling, drafts=drafts) == plain


def test_text_depends_on_the_seed(tiny_model: Callable[..., Model]) -> None:
    target, prompt = Target(tiny_model("llama"), CACHE), make_prompt(7, 21)
    texts = {tuple(generate(target, prompt, 20, sampling=SAMPLED, seed=seed)) for seed in range(5)}
    assert len(texts) == 5


def test_a_lost_cache_is_asked_for_and_changes_nothing(tiny_model: Callable[..., Model]) -> None:
    model, prompt = tiny_model("llama"), make_prompt(3, 30)
    plain = generate(Target(model, CACHE), prompt, 30, sampling=SAMPLED)
    forgetful = generate(
        Target(model, CACHE),
        prompt,
        30,
        sampling=SAMPLED,
        drafts=random_drafts(3),
        forget_every=2,
    )
    assert forgetful == plain


def test_a_prompt_that_begins_like_another_runs_only_the_rest(
    tiny_model: Callable[..., Model],
) -> None:
    cold = Target(tiny_model("llama"), CacheOptions(block_size=4, prefix_caching=False))
    warm = Target(tiny_model("llama"), CacheOptions(block_size=4))
    generate(warm, make_prompt(5, 41), 5)
    for end in ([3, 4], [5], [6, 7, 8]):
        prompt = make_prompt(5, 41) + end
        run_before = warm.num_tokens_run
        texts = [
            generate(target, prompt, 20, seq_id=str(end), drafts=random_drafts(3))
            for target in (cold, warm)
        ]
        assert texts[0] == texts[1]
        assert warm.num_prefix_tokens > 0
        assert warm.num_tokens_run - run_before < 20 * 4 + 4
    assert warm.num_prefix_tokens == 3 * 40
    assert cold.num_prefix_tokens == 0


def test_drafts_that_are_no_tokens_of_the_target_are_dropped(
    tiny_model: Callable[..., Model],
) -> None:
    target = Target(tiny_model("llama"), CACHE)
    (first,) = target.verify(
        [VerifyRequest(seq_id="s", base_len=0, new_tokens=(5,), prompt_len=1, sampling=GREEDY)]
    )
    (second,) = target.verify(
        [
            VerifyRequest(
                seq_id="s",
                base_len=1,
                new_tokens=first.tokens,
                draft_tokens=(VOCAB_SIZE, -1, 3),
                prompt_len=1,
                sampling=GREEDY,
            )
        ]
    )
    assert (len(second.tokens), second.num_accepted, second.num_tested) == (1, 0, 0)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_rule_that_compares_laws_rejects_them_itself(
    rule: Rule, tiny_model: Callable[..., Model]
) -> None:
    """What takes the place of a draft that the target does not know has the residual law."""
    law = DraftLaw(tokens=np.array([VOCAB_SIZE, 7]), weights=np.array([1, 1]))
    sampling = SamplingParams(temperature=20.0, logit_bias=((7, 600.0), (9, 600.0)))
    request = VerifyRequest(
        seq_id="s",
        base_len=0,
        new_tokens=(5,),
        draft_tokens=(VOCAB_SIZE, 3),
        draft_law=(law.pack(), b""),
        prompt_len=1,
        sampling=sampling,
        verification=rule,
    )
    target = Target(tiny_model("llama"), CACHE)

    def verify(request: VerifyRequest, seed: int) -> VerifyResult:
        (result,) = target.verify([dataclasses.replace(request, seq_id=str(seed), seed=seed)])
        target.release([str(seed)])
        return result

    results = [verify(request, seed) for seed in range(40)]
    for result in results:
        assert (len(result.tokens), result.num_accepted, result.num_tested) == (1, 0, 1)
    plain = dataclasses.replace(request, draft_tokens=(), draft_law=())
    num_plain = sum(verify(plain, seed).tokens == (7,) for seed in range(40))
    assert sum(result.tokens == (7,) for result in results) < num_plain / 2


@pytest.mark.parametrize("gamma", [0, 4])
def test_a_padded_id_is_a_token_without_text(gamma: int, tmp_path: Path) -> None:
    """Embeddings are larger than vocabularies: such an id is a legal arg-max, not a failure."""
    name = save_model(tmp_path)
    save_tokenizer(tmp_path, ["unknown", "a", "b"])
    padded = VOCAB_SIZE - 1
    sampling = dataclasses.replace(GREEDY, logit_bias=((padded, 100.0),))
    target = Target(load_model(name, dtype="float32", device="cpu"), CACHE)
    tokens = generate(target, [1, 2, 1], 4, sampling=sampling, drafts=lambda *_: [padded] * gamma)
    assert tokens == [padded] * 4
    assert find_tokenizer(name).decode(tokens, skip_special_tokens=True) == ""


def test_release_answers_what_waits_and_frees_everything(tiny_model: Callable[..., Model]) -> None:
    target = Target(tiny_model("llama"), CACHE, max_batched_tokens=16)
    prompt = tuple(make_prompt(0, 60))
    target.submit(VerifyRequest(seq_id="s", base_len=0, new_tokens=prompt, prompt_len=60))
    target.step()
    assert target.num_used_blocks > 0
    (result,) = target.release(["s", "unknown"])
    assert result.is_released
    assert (target.num_used_blocks, target.num_sequences, target.num_waiting) == (0, 0, 0)
    target.check_integrity()


def test_a_second_request_answers_the_first_as_released(tiny_model: Callable[..., Model]) -> None:
    target = Target(tiny_model("llama"), CACHE)
    request = VerifyRequest(seq_id="s", base_len=0, new_tokens=(5, 6), prompt_len=2)
    assert target.submit(request) == []
    (released,) = target.submit(request)
    assert released.is_released
    results, _ = target.step()
    assert [result.is_released for result in results] == [False]


def test_too_long_a_sequence_is_refused(tiny_model: Callable[..., Model]) -> None:
    target = Target(tiny_model("llama"), CacheOptions(block_size=4, max_model_len=16))
    request = VerifyRequest(seq_id="s", base_len=10, new_tokens=(1,) * 7, prompt_len=2)
    (refused,) = target.submit(request)
    assert re.search(r"17 tokens.*at most 16", refused.error)
    assert target.num_waiting == target.num_sequences == 0


class TestCacheSize:
    def test_explicit_length_that_does_not_fit_says_so(
        self, tiny_model: Callable[..., Model]
    ) -> None:
        with pytest.raises(ConfigError, match="raise kv_cache_gib or lower max_model_len"):
            Target(
                tiny_model("llama"), CacheOptions(max_model_len=256, kv_cache_gib=16 * 768 / GIB)
            )

    def test_default_length_shrinks_to_what_fits(self, tiny_model: Callable[..., Model]) -> None:
        model = tiny_model("llama")
        assert model.slot_bytes == 3 * 2 * (8 + 8) * 4
        room = 100 * model.slot_bytes / GIB
        target = Target(model, CacheOptions(block_size=16, kv_cache_gib=room))
        assert (target.info.max_model_len, target.info.num_blocks) == (96, 6)

    def test_more_than_the_models_positions_is_refused(
        self, tiny_model: Callable[..., Model]
    ) -> None:
        with pytest.raises(ConfigError, match=r"max_model_len is 300.*256 tokens"):
            Target(tiny_model("llama"), CacheOptions(max_model_len=300))

    def test_no_more_is_allocated_than_can_be_used(self, tiny_model: Callable[..., Model]) -> None:
        target = Target(tiny_model("llama"), CacheOptions(block_size=16, max_num_seqs=3))
        assert target.info.num_blocks == 3 * 256 // 16


class Sceptic:
    """A rule that accepts no draft: the target's own token at the first position is all."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []
        self._coupled = CoupledRule()

    def judge(self, logits: torch.Tensor, runs: Sequence[JudgedRun]) -> list[Verdict]:
        self.shapes.append((len(logits), sum(len(run.draft_tokens) + 1 for run in runs)))
        return [
            Verdict(tokens=verdict.tokens[:1], num_accepted=0, num_tested=verdict.num_tested)
            for verdict in self._coupled.judge(logits, runs)
        ]


def test_the_rule_decides_what_is_accepted(tiny_model: Callable[..., Model]) -> None:
    """It is given a row of logits for each draft and one more; what it rejects is rolled back."""
    model, prompt = tiny_model("llama"), make_prompt(0, 20)
    plain = generate(Target(model, CACHE), prompt, 20)
    rule = Sceptic()
    target = Target(model, CACHE, rule=rule)
    drafts = knowing_drafts(plain, len(prompt), 4, wrong_every=100)
    assert generate(target, prompt, 20, drafts=drafts) == plain
    assert len(rule.shapes) == 20  # a token in each step
    assert all(num_rows == wanted for num_rows, wanted in rule.shapes)
    assert max(wanted for _, wanted in rule.shapes) == 5


def test_a_rule_that_fails_for_one_sequence_fails_for_it_alone(
    tiny_model: Callable[..., Model],
) -> None:
    class Picky(CoupledRule):
        def judge(self, logits: torch.Tensor, runs: Sequence[JudgedRun]) -> list[Verdict]:
            if any(run.draft_tokens for run in runs):
                raise ArithmeticError("no drafts, please")
            return super().judge(logits, runs)

    model = tiny_model("llama")
    request = VerifyRequest(seq_id="good", base_len=0, new_tokens=(5, 6), prompt_len=2)
    (alone,) = Target(model, CACHE).verify([request])
    drafted = dataclasses.replace(request, seq_id="drafted", draft_tokens=(7,))
    failed, good = Target(model, CACHE, rule=Picky()).verify([drafted, request])
    assert "internal error" in failed.error
    assert good == alone
