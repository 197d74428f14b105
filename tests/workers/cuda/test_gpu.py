"""The same tokens on CUDA as on the CPU; run by `make test-gpu`, which needs no Ray."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from cluster import bundled
from cluster.tensor_parallel import TensorParallelGroup, open_meeting_point
from tandem.decoding import Decoder
from tandem.gpu_report.subjects import make_prompts as make_code_prompts
from tests.tiny_configs import SUPPORTED
from tests.tiny_models import save_model
from tests.workers.decoding import random_drafts
from tests.workers.test_target import GREEDY, SAMPLED, generate, make_prompt
from workers.cuda.graphed_step import GraphedStep
from workers.drafters.model import ModelDrafter
from workers.model import Model, load_model
from workers.paged_model import CacheOptions
from workers.sampling_params import SamplingParams
from workers.step_inputs import LayerCache, StepInputs, step_inputs
from workers.step_plan import StepPlan
from workers.target import Target
from workers.types import VerifyRequest

pytestmark = pytest.mark.gpu

CACHE = CacheOptions(block_size=16, max_num_seqs=8)
# In bf16 two logits this close may swap when a kernel sums in another order: a few units in the
# last place of logits of order ten.
NEAR_TIE = 0.25


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_bundled_pair_writes_what_it_writes_on_a_cpu(sampling: SamplingParams) -> None:
    """In fp32, with drafts of the bundled draft made on the device and without."""
    torch.backends.cuda.matmul.allow_tf32 = False
    names = [bundled.resolve(name) for name in (bundled.TARGET_NAME, bundled.DRAFT_NAME)]
    cache = CacheOptions(block_size=16, max_num_seqs=8, max_model_len=256)

    def make_decoder(device: str) -> Decoder:
        target, draft = (load_model(name, dtype="float32", device=device) for name in names)
        return Decoder(Target(target, cache), ModelDrafter(draft, cache))

    prompts = [prompt[:60] for prompt in make_code_prompts(4)]
    expected = make_decoder("cpu").decode(prompts, 40, sampling=sampling)
    on_cuda = make_decoder("cuda")
    for gamma in (0, 4):
        assert on_cuda.decode(prompts, 40, gamma=gamma, sampling=sampling) == expected
    assert on_cuda.num_accepted > 0


def test_the_first_rank_of_a_group_decodes_on_cuda(tmp_path: Path) -> None:
    """A group of one: plans go over gloo, and the process group has NCCL beside it."""
    torch.backends.cuda.matmul.allow_tf32 = False
    name = save_model(tmp_path)
    prompt = make_prompt(0, 20)
    on_cpu = Target(load_model(name, dtype="float32", device="cpu"), CACHE)
    expected = generate(on_cpu, prompt, 40, sampling=SAMPLED)
    point, store = open_meeting_point("127.0.0.1", 1)
    group = TensorParallelGroup(point, rank=0, device_type="cuda", store=store)
    try:
        target = Target(load_model(name, dtype="float32", device="cuda"), CACHE, ranks=group)
        assert generate(target, prompt, 40, sampling=SAMPLED) == expected
    finally:
        group.close()


def test_fused_kernel_is_used_and_equals_the_gather_path(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Which block sizes have a fused kernel is reported; where there is one, it must agree."""
    name = save_model(tmp_path, "mistral", hidden_size=128, num_attention_heads=4)
    model = load_model(name, dtype="bfloat16", device="cuda")
    available = {
        size: model.make_cache(2, size)[0].kernel is not None for size in (16, 64, 128, 256)
    }
    record_property("varlen_attn with a block table, by block size", available)
    for block_size in (size for size, is_there in available.items() if is_there):
        logits = []
        for is_fused in (True, False):
            layers = model.make_cache(8, block_size)
            if not is_fused:
                layers = tuple(
                    type(layer)(keys=layer.keys, values=layer.values) for layer in layers
                )
            logits.append(_verify_logits(model, layers, block_size))
        torch.testing.assert_close(logits[0], logits[1], atol=0.1, rtol=0.02)


def _verify_logits(model: Model, layers: Sequence[LayerCache], block_size: int) -> torch.Tensor:
    tokens = make_prompt(1, 40)
    table = [3, 1, 5, 0, 2, 4, 6][: -(-40 // block_size)]
    logits = torch.empty(0)
    for start, end in ((0, 35), (35, 40)):
        plan = StepPlan()
        plan.add_chunk(
            tokens[start:end], cached_len=start, block_table=table, num_logits=end - start
        )
        logits = model.forward(_inputs(model, layers, plan, block_size=block_size))
    return logits.float()


def _inputs(
    model: Model, layers: Sequence[LayerCache], plan: StepPlan, *, block_size: int
) -> StepInputs:
    return step_inputs(
        plan, layers, vocab_size=model.vocab_size, block_size=block_size, device=model.device
    )


def test_bf16_differs_at_near_ties_only(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Teacher-forced: wherever speculation changes a token, the two logits were nearly equal."""
    name = save_model(tmp_path, "llama")
    target = Target(load_model(name, dtype="bfloat16", device="cuda"), CACHE)
    reference = Target(load_model(name, dtype="float32", device="cpu"), CACHE)
    gaps = []
    for seed in range(10):
        prompt = make_prompt(seed, 20)
        plain = generate(target, prompt, 60)
        drafted = generate(target, prompt, 60, drafts=random_drafts(4, seed))
        first = next((i for i in range(60) if plain[i] != drafted[i]), None)
        if first is not None:
            gaps.append(_logit_gap(reference, prompt + plain[:first], plain[first], drafted[first]))
    record_property("bf16 texts that differ, of 10", len(gaps))
    record_property("logit gaps where they first differ", gaps)
    assert all(gap < NEAR_TIE for gap in gaps)


def test_graphs_are_used_and_differ_at_near_ties_only(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Wherever there is a fused kernel; products of padded steps may round differently."""
    name = save_model(tmp_path, "llama", hidden_size=128, num_attention_heads=4)
    reference = Target(load_model(name, dtype="float32", device="cpu"), CACHE)
    gaps = []
    for block_size in _fused_block_sizes(name):
        cache = CacheOptions(block_size=block_size, max_num_seqs=8)
        plain, graphed = (
            Target(load_model(name, dtype="bfloat16", device="cuda"), cache) for _ in range(2)
        )
        graphed.start_compiling().join()
        assert isinstance(graphed._paged.forward, GraphedStep)
        for seed in range(5):
            prompt = make_prompt(seed, 20)
            expected = generate(plain, prompt, 60)
            for drafts in (random_drafts(0), random_drafts(4, seed)):
                text = generate(graphed, prompt, 60, drafts=drafts)
                first = next((i for i in range(60) if text[i] != expected[i]), None)
                if first is not None:
                    prefix = prompt + expected[:first]
                    gaps.append(_logit_gap(reference, prefix, expected[first], text[first]))
    record_property("logit gaps where texts of graphs first differ", gaps)
    assert all(gap < NEAR_TIE for gap in gaps)


def _fused_block_sizes(name: str) -> list[int]:
    model = load_model(name, dtype="bfloat16", device="cuda")
    sizes = [s for s in (16, 64, 128, 256) if model.make_cache(2, s)[0].kernel is not None]
    if not sizes:
        pytest.skip("no fused kernel here takes a block table")
    return sizes


def _logit_gap(reference: Target, prefix: list[int], first: int, second: int) -> float:
    """Between two tokens after a prefix, in fp32: the bias that makes the second one win."""
    model = reference._paged.model
    layers = model.make_cache(16, 16)
    plan = StepPlan()
    plan.add_chunk(prefix, cached_len=0, block_table=range(16), num_logits=1)
    logits = model.forward(_inputs(model, layers, plan, block_size=16))[0]
    return float((logits[first] - logits[second]).abs())


def test_sampling_on_the_device_equals_the_cpu(tmp_path: Path) -> None:
    """One prefill of many sequences with every kind of parameters."""
    name = save_model(tmp_path)
    kinds = [
        SamplingParams(temperature=0.7, top_k=10),
        SamplingParams(temperature=1.2, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.1, repetition_penalty=1.3),
        SamplingParams(temperature=0.9, presence_penalty=0.5, logit_bias=((5, 2.0),)),
        GREEDY,
    ]
    batch = [
        VerifyRequest(
            seq_id=str(i),
            base_len=0,
            new_tokens=tuple(make_prompt(i, 12)),
            prompt_len=6,
            sampling=kinds[i % len(kinds)],
            seed=i,
        )
        for i in range(20)
    ]
    tokens = [
        [r.tokens for r in Target(load_model(name, dtype="float32", device=device)).verify(batch)]
        for device in ("cpu", "cuda")
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("family", sorted(SUPPORTED))
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_fp32_tokens_equal_the_cpus(family: str, sampling: SamplingParams, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    name = save_model(tmp_path, family)
    on_cpu, on_cuda = (
        Target(load_model(name, dtype="float32", device=device), CACHE)
        for device in ("cpu", "cuda")
    )
    prompt = make_prompt(0, 30)
    expected = generate(on_cpu, prompt, 40, sampling=sampling)
    assert generate(on_cuda, prompt, 40, sampling=sampling) == expected
    drafted = generate(on_cuda, prompt, 40, sampling=sampling, drafts=random_drafts(4))
    assert drafted == expected
