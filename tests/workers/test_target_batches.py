"""The target with many sequences: batches, chunks of prompts, shortage of blocks."""

import dataclasses
from collections.abc import Callable

import pytest

from tests.workers.decoding import CACHE, GREEDY, SAMPLED, generate, make_prompt, random_drafts
from workers.cache_size import GIB
from workers.model import Model
from workers.paged_model import CacheOptions
from workers.target import Target
from workers.types import VerifyRequest


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


@pytest.mark.parametrize("gamma", [0, 4])
def test_shortage_of_blocks_preempts_the_youngest_and_all_finish(
    gamma: int, tiny_model: Callable[..., Model]
) -> None:
    """Eight sequences of 40 tokens in a cache for one of 44: everybody finishes, as if alone."""
    model = tiny_model("llama")
    small = CacheOptions(block_size=4, max_model_len=44, max_num_seqs=1)
    prompts = {f"s{i}": make_prompt(i, 20) for i in range(8)}
    alone = {
        seq_id: generate(Target(model, CACHE), prompt, 20, sampling=SAMPLED)
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
            if len(tokens[seq_id]) >= 40:
                unfinished.discard(seq_id)
                target.release([seq_id])
            else:
                waiting += target.submit(request(seq_id))
    assert target.num_preemptions >= num_preempted > 0
    assert {s: t[20:40] for s, t in tokens.items()} == alone
    assert target.num_used_blocks == 0
