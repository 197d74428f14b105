"""The target as a worker: exactness, soft state, chunking, shortage of blocks."""

import dataclasses
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny_models import VOCAB_SIZE, load_reference, save_model, save_tokenizer
from tests.workers.decoding import (
    CACHE,
    GREEDY,
    PENALISED,
    SAMPLED,
    Drafts,
    generate,
    make_prompt,
)
from workers.cache_size import GIB
from workers.draft_law import DraftLaw
from workers.errors import ConfigError
from workers.model import Model, load_model
from workers.paged_model import CacheOptions
from workers.target import Target
from workers.tokenizer import find_tokenizer
from workers.types import Rule, SamplingParams, VerifyRequest, VerifyResult
from workers.verification import CoupledRule, JudgedRun, Verdict


def random_drafts(length: int, seed: int = 0) -> Drafts:
    rng = random.Random(seed)
    return lambda *_: rng.choices(range(VOCAB_SIZE), k=length)


def knowing_drafts(truth: Sequence[int], prompt_len: int, length: int, wrong_every: int) -> Drafts:
    """Drafts that are right, but for every so many."""

    def propose(_: str, tokens: Sequence[int]) -> list[int]:
        start = len(tokens) - prompt_len
        guesses = list(truth[start : start + length])
        return [
            (g + 1) % VOCAB_SIZE if (start + i) % wrong_every == 0 else g
            for i, g in enumerate(guesses)
        ]

    return propose


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gpt_oss"])
def test_greedy_equals_transformers_generate(family: str, tiny_model: Callable[..., Model]) -> None:
    model = tiny_model(family)
    reference = load_reference(model.name)
    for seed in range(4):
        prompt = make_prompt(seed, 5 + 9 * seed)
        expected = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
        )[0, len(prompt) :].tolist()
        assert generate(Target(model, CACHE), prompt, 40) == expected
        drafts = knowing_drafts(expected, len(prompt), 4, wrong_every=5)
        assert generate(Target(model, CACHE), prompt, 40, drafts=drafts) == expected


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "T", "penalty"])
@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_text_does_not_depend_on_the_drafts(
    sampling: SamplingParams, gamma: int, tiny_model: Callable[..., Model]
) -> None:
    model, prompt = tiny_model("qwen3"), make_prompt(7, 21)
    plain = generate(Target(model, CACHE), prompt, 48, sampling=sampling)
    assert len(set(plain)) > 5
    for drafts in (
        random_drafts(gamma),
        knowing_drafts(plain, len(prompt), gamma, wrong_every=3),
        knowing_drafts(plain, len(prompt), gamma, wrong_every=10**6),
    ):
        assert generate(Target(model, CACHE), prompt, 48, sampling=sampling, drafts=drafts) == plain


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


def test_a_new_prompt_waits_for_room_although_its_beginning_is_cached(
    tiny_model: Callable[..., Model],
) -> None:
    """Answered as preempted, it would be sent again at once, and again, until there is room."""
    model = tiny_model("llama")
    kv_cache_gib = 10 * 4 * model.slot_bytes / GIB  # ten blocks
    cache = CacheOptions(block_size=4, max_model_len=40, kv_cache_gib=kv_cache_gib)
    target, prompt = Target(model, cache), make_prompt(5, 37)
    running = VerifyRequest(
        seq_id="running", base_len=0, new_tokens=tuple(prompt), prompt_len=37, sampling=GREEDY
    )
    target.verify([running])
    waiting = dataclasses.replace(running, seq_id="waiting", new_tokens=(*prompt[:33], 3))
    assert target.submit(waiting) == []
    assert target.step() == ([], False)
    assert target.num_waiting == 1
    target.release(["running"])
    (result,), has_run = target.step()
    assert has_run
    assert result.tokens


def test_a_batch_of_many_lengths_equals_one_by_one(tiny_model: Callable[..., Model]) -> None:
    model = tiny_model("mistral")
    prompts = [make_prompt(i, length) for i, length in enumerate([1, 2, 15, 16, 17, 40, 90, 5])]
    alone = [generate(Target(model, CACHE), p, 1, sampling=SAMPLED, seed=i)
             for i, p in enumerate(prompts)]  # fmt: skip
    target = Target(model, CACHE, max_batched_tokens=32)
    results = target.verify(
        [
            VerifyRequest(
                seq_id=str(i),
                base_len=0,
                new_tokens=tuple(prompt),
                prompt_len=len(prompt),
                sampling=SAMPLED,
                seed=i,
            )
            for i, prompt in enumerate(prompts)
        ]
    )
    assert [list(result.tokens) for result in results] == alone
    assert target.num_sequences == len(prompts)
    target.check_integrity()


def test_a_long_prompt_is_cut_and_short_work_goes_first(tiny_model: Callable[..., Model]) -> None:
    target = Target(tiny_model("llama"), CACHE, max_batched_tokens=32)
    target.verify([VerifyRequest(seq_id="short", base_len=0, new_tokens=(5, 6), prompt_len=2)])
    target.submit(
        VerifyRequest(
            seq_id="long", base_len=0, new_tokens=tuple(make_prompt(0, 100)), prompt_len=100
        )
    )
    answered = []
    base_len = 2
    for _ in range(4):
        target.submit(
            VerifyRequest(seq_id="short", base_len=base_len, new_tokens=(9,), prompt_len=2)
        )
        base_len += 1
        results, has_run = target.step()
        assert has_run
        answered.append([result.seq_id for result in results])
    assert answered == [["short"], ["short"], ["short"], ["short", "long"]]


def test_prompts_of_several_tenants_take_turns(tiny_model: Callable[..., Model]) -> None:
    """One that comes to a target that has many of another's is answered next."""
    target = Target(tiny_model("llama"), CACHE, max_batched_tokens=64)

    def ask(seq_id: str, tenant: str) -> None:
        prompt = tuple(make_prompt(len(seq_id), 60))
        target.submit(
            VerifyRequest(
                seq_id=seq_id, base_len=0, new_tokens=prompt, prompt_len=60, tenant=tenant
            )
        )

    for number in range(5):
        ask(f"flood-{number}", "flood")
    target.step()  # the first, and the beginning of the second
    ask("quiet", "quiet")
    answered = []
    while target.num_waiting:
        answered += [result.seq_id for result in target.step()[0]]
    assert answered[0] == "quiet"
    assert answered[1:] == [f"flood-{number}" for number in range(1, 5)]


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

    results = [verify(request, seed) for seed in range(100)]
    for result in results:
        assert (len(result.tokens), result.num_accepted, result.num_tested) == (1, 0, 1)
    plain = dataclasses.replace(request, draft_tokens=(), draft_law=())
    num_plain = sum(verify(plain, seed).tokens == (7,) for seed in range(100))
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


@pytest.mark.parametrize("gamma", [0, 4])
def test_shortage_of_blocks_preempts_the_youngest_and_all_finish(
    gamma: int, tiny_model: Callable[..., Model]
) -> None:
    """Eight sequences of 60 tokens in a cache for one of 64: everybody finishes, as if alone."""
    model = tiny_model("llama")
    small = CacheOptions(block_size=4, max_model_len=64, max_num_seqs=1)
    prompts = {f"s{i}": make_prompt(i, 20) for i in range(8)}
    alone = {
        seq_id: generate(Target(model, CACHE), prompt, 40, sampling=SAMPLED)
        for seq_id, prompt in prompts.items()
    }
    target = Target(model, small, max_batched_tokens=16)
    tokens = {seq_id: list(prompt) for seq_id, prompt in prompts.items()}
    cached = dict.fromkeys(prompts, 0)
    drafts = random_drafts(gamma)

    def request(seq_id: str) -> VerifyRequest:
        return VerifyRequest(
            seq_id=seq_id,
            base_len=cached[seq_id],
            new_tokens=tuple(tokens[seq_id][cached[seq_id] :]),
            draft_tokens=tuple(drafts(seq_id, tokens[seq_id])),
            prompt_len=20,
            sampling=SAMPLED,
            seed=1,
        )

    waiting = [result for seq_id in prompts for result in target.submit(request(seq_id))]
    num_preempted, num_steps, unfinished = 0, 0, set(prompts)
    while unfinished:
        num_steps += 1
        assert num_steps < 3000, "no progress"
        results, _ = target.step()
        target.check_integrity()
        for result in waiting + results:
            waiting = []
            seq_id = result.seq_id
            if result.needs_tokens_from is not None:
                num_preempted += 1
                cached[seq_id] = result.needs_tokens_from
            else:
                cached[seq_id] = len(tokens[seq_id]) + result.num_accepted
                tokens[seq_id] += result.tokens
            if len(tokens[seq_id]) >= 60:
                unfinished.discard(seq_id)
                target.release([seq_id])
            else:
                waiting += target.submit(request(seq_id))
    assert target.num_preemptions >= num_preempted > 0
    assert {s: t[20:60] for s, t in tokens.items()} == alone
    assert target.num_used_blocks == 0


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
