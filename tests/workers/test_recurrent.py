"""Recurrent states: whatever happens to a sequence, its text is that of the model alone."""

import random
from collections.abc import Callable

import pytest

from tests.tiny_configs import VOCAB_SIZE
from tests.workers.decoding import CACHE, GREEDY, SAMPLED, generate, make_prompt
from workers.cache_size import GIB, CacheNeeds, CacheShares, share_cache
from workers.drafters.model import ModelDrafter
from workers.errors import KVCacheExhaustedError
from workers.kv_cache import BlockAllocator, SequenceTable
from workers.model import Model, load_model
from workers.paged_model import CacheOptions
from workers.sampling_params import SamplingParams
from workers.state_slots import num_slots
from workers.target import Target
from workers.types import ProposeRequest, VerifyRequest, VerifyResult

LENGTH = 42
"""The tokens of a text with its prompt, over which preemptions and rejected drafts happen."""


WITH_SMALL_STATES = {
    "qwen3_5": {"num_key_value_heads": 4},
    "qwen3_next": {"num_key_value_heads": 4},
    "lfm2": {"num_key_value_heads": 4},
    "bamba": {"num_key_value_heads": 4, "mamba_n_heads": 4, "mamba_expand": 1},
}
"""Models with many heads for keys and values: with fewer, or larger states, these would take so
much of the cache that blocks never run out."""


class Router:
    """Sequences that are verified in a random order, of which anything may get lost."""

    def __init__(self, target: Target, texts: dict[str, list[int]], prompt_len: int) -> None:
        self.target, self.texts, self.prompt_len = target, texts, prompt_len
        self.tokens = {seq_id: text[:prompt_len] for seq_id, text in texts.items()}
        self.cached = dict.fromkeys(texts, 0)

    def run_round(self, rng: random.Random, seq_ids: list[str]) -> None:
        try:
            results = self.target.verify([self.request(rng, seq_id) for seq_id in seq_ids])
        except KVCacheExhaustedError:
            self.target.release([*seq_ids, rng.choice(sorted(self.texts))])
            return
        for result in results:
            if rng.random() < 0.1:
                continue  # the answer is lost
            self.take(result)

    def request(self, rng: random.Random, seq_id: str) -> VerifyRequest:
        tokens = self.tokens[seq_id]
        text = self.texts[seq_id]
        right = text[len(tokens) : len(tokens) + rng.randrange(6)]
        wrong = rng.choices(range(VOCAB_SIZE), k=rng.randrange(4))
        return VerifyRequest(
            seq_id=seq_id,
            base_len=self.cached[seq_id],
            new_tokens=tuple(tokens[self.cached[seq_id] :]),
            draft_tokens=tuple(right + wrong),
            prompt_len=self.prompt_len,
            sampling=SAMPLED,
            seed=1,
        )

    def take(self, result: VerifyResult) -> None:
        assert not result.error
        tokens = self.tokens[result.seq_id]
        if result.needs_tokens_from is not None:
            self.cached[result.seq_id] = result.needs_tokens_from
            return
        self.cached[result.seq_id] = len(tokens) + result.num_accepted
        tokens += result.tokens
        assert tokens == self.texts[result.seq_id][: len(tokens)]


def scarce_cache(model: Model) -> CacheOptions:
    """Room for the states of three sequences, and for the blocks of fewer at full length."""
    states_bytes = num_slots(3) * model.state_bytes
    blocks_bytes = max(states_bytes, 18 * 4 * model.slot_bytes)
    return CacheOptions(
        block_size=4,
        max_model_len=60,
        max_num_seqs=3,
        kv_cache_gib=(states_bytes + blocks_bytes + 1) / GIB,
    )


@pytest.mark.parametrize("family", WITH_SMALL_STATES)
def test_states_survive_rejections_preemption_and_moves(
    family: str, tiny_model: Callable[..., Model]
) -> None:
    model, rng = tiny_model(family, **WITH_SMALL_STATES[family]), random.Random(0)
    texts = {}
    for index in range(4):
        prompt = make_prompt(index, 18)
        alone = generate(
            Target(model, CACHE), prompt, LENGTH - 12, sampling=SAMPLED, seq_id=str(index)
        )
        texts[str(index)] = prompt + alone
    target = Target(model, scarce_cache(model), max_batched_tokens=16)
    router = Router(target, texts, 18)
    for _ in range(500):
        running = [seq_id for seq_id in texts if len(router.tokens[seq_id]) < LENGTH]
        if not running:
            break
        router.run_round(rng, rng.sample(running, k=min(len(running), rng.randint(1, 3))))
        target.check_integrity()
        if rng.random() < 0.1:
            target.release([rng.choice(running)])
    assert not running
    assert target.num_preemptions > 0


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_recurrent_drafter_goes_back_behind_assumed_tokens(
    sampling: SamplingParams, tiny_model: Callable[..., Model]
) -> None:
    """The same model drafts and decides: whatever it has guessed before, its drafts are right."""
    model, prompt, rng = tiny_model("qwen3_5"), make_prompt(2, 30), random.Random(1)
    text = prompt + generate(Target(model, CACHE), prompt, 50, sampling=sampling, seed=1)
    drafter = ModelDrafter(model, CACHE, max_batched_tokens=16)
    length, base_len = len(prompt), 0
    while length < len(text) - 15:
        right = text[length : length + rng.randrange(3)]
        is_wrong = rng.random() < 0.4
        assumed = [*right, (text[length + len(right)] + 1) % VOCAB_SIZE] if is_wrong else right
        (result,) = drafter.propose(
            [
                ProposeRequest(
                    seq_id="s",
                    base_len=base_len,
                    new_tokens=tuple(text[base_len:length]),
                    assumed_tokens=tuple(assumed),
                    k=4,
                    prompt_len=len(prompt),
                    sampling=sampling,
                    seed=1,
                )
            ]
        )
        drafter.check_integrity()
        if not is_wrong:
            start = length + len(assumed)
            assert list(result.draft_tokens) == text[start : start + 4]
        base_len = length
        length += rng.randint(1, 6)


def test_a_rejected_draft_costs_no_second_call(tiny_model: Callable[..., Model]) -> None:
    """What was accepted before it is run again from what the worker knows."""
    model, prompt = tiny_model("qwen3_5"), make_prompt(2, 10)
    target = Target(model, CACHE)
    text = prompt + generate(target, prompt, 10)
    drafts = (text[10], text[11], (text[12] + 1) % VOCAB_SIZE)
    first = VerifyRequest(
        seq_id="s", base_len=0, new_tokens=tuple(prompt), prompt_len=10, sampling=GREEDY,
        draft_tokens=drafts,
    )  # fmt: skip
    assert target.verify([first])[0].num_accepted == 2
    run_before = target.num_tokens_run
    second = VerifyRequest(
        seq_id="s", base_len=12, new_tokens=(text[12],), prompt_len=10, sampling=GREEDY
    )
    assert target.verify([second])[0].tokens == (text[13],)
    assert target.num_tokens_run - run_before == 3


def test_logprobs_of_a_prompt_that_is_run_again_from_its_beginning(
    tiny_model: Callable[..., Model],
) -> None:
    target, prompt = Target(tiny_model("qwen3_5"), CACHE), make_prompt(2, 30)

    def logprobs(base_len: int) -> list[float]:
        request = VerifyRequest(
            seq_id="s", base_len=base_len, new_tokens=tuple(prompt[base_len:]), prompt_len=30,
            num_prompt_logprobs=1,
        )  # fmt: skip
        return [found.logprob for found in target.verify([request])[0].prompt_logprobs]

    assert logprobs(10) == []  # nothing is cached
    whole = logprobs(0)
    assert logprobs(10) == pytest.approx(whole[10:])


def test_timed_steps_leave_states_alone(tiny_model: Callable[..., Model]) -> None:
    target, prompt = Target(tiny_model("qwen3_5"), CACHE), make_prompt(2, 30)
    plain = generate(target, prompt, 20)

    def measure(*_: object) -> tuple[()]:
        target.time_step((2, 6))
        return ()

    assert generate(target, prompt, 20, drafts=measure) == plain


def test_a_lower_precision_is_warned_of(tiny_model: Callable[..., Model]) -> None:
    model = tiny_model("qwen3_5")
    assert model.text_warnings == ()
    in_bf16 = load_model(model.name, dtype="bfloat16", device="cpu")
    assert "a text may depend on drafts" in in_bf16.text_warnings[0]


def test_states_are_given_to_as_many_sequences_as_there_are() -> None:
    table = SequenceTable(BlockAllocator(8, 4), with_prefixes=False, num_states=2)
    for seq_id in "ab":
        sequence, _ = table.synchronise(seq_id, 0, [1, 2])
        table.reserve(sequence, 2)
    third, _ = table.synchronise("c", 0, [1, 2])
    with pytest.raises(KVCacheExhaustedError, match="all recurrent states are taken"):
        table.reserve(third, 2)
    table.check_integrity()
    table.drop("a")
    table.reserve(third, 2)
    table.check_integrity()


def test_a_sequence_that_holds_nothing_but_a_state_gives_way_too() -> None:
    """It is one that begins anew, since neither of its states fits what its tokens are now."""
    table = SequenceTable(BlockAllocator(8, 4), with_prefixes=False, num_states=1)
    table.synchronise("older", 0, [1, 2])
    younger, _ = table.synchronise("younger", 0, [1, 2])
    table.reserve(younger, 2)
    younger.record([1, 2], 2)
    _, remaining = table.synchronise("younger", 1, [3])
    assert (remaining, younger.block_table) == ((1, 3), [])
    assert table.youngest() is younger


def test_the_longest_sequence_has_its_blocks_before_others_have_states() -> None:
    needs = CacheNeeds(block_bytes=10, blocks_per_sequence=7, state_bytes=5, max_num_seqs=4)
    assert needs.least_bytes == 4 * 5 + 70
    assert share_cache(90, needs) == CacheShares(num_blocks=7, num_states=1)
    assert share_cache(99, needs) == CacheShares(num_blocks=7, num_states=1)
    assert share_cache(101, needs) == CacheShares(num_blocks=7, num_states=2)
    assert share_cache(40, needs) == CacheShares(num_blocks=2, num_states=1)
    assert share_cache(10**6, needs) == CacheShares(num_blocks=28, num_states=4)
