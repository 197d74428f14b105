"""What is measured: the bundled pair, and targets grown from it on the device."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from cluster import bundled
from tandem.demo.corpus import Corpus, held_out_prompts
from tandem.demo.grow import GrownSize, grow
from tandem.gpu_report.findings import Notebook
from workers import attention
from workers.drafters.model import ModelDrafter
from workers.model import Model, load_model, make_model
from workers.paged_model import CacheOptions, Ranks
from workers.step_times import VERIFY_SIZES, Size, StepTiming
from workers.target import Target
from workers.types import StepTime

BLOCK_SIZES = (16, 64, 128, 256)
MAX_TOKENS = 1024
"""The longest sequence of any step."""
MORE_SIZES: tuple[Size, ...] = ((64, 64), (64, 128), (32, 256), (32, 288), (64, 512), (64, 576))
"""Sizes that a worker's own table does not have; the last is more than any graph has."""
OWN_ATTENTION = "sdpa"
"""The attention that transformers runs a model with by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subjects:
    """How large a report's targets are, and where they run."""

    device: str
    targets: dict[str, GrownSize]
    """Targets by name, the one that decodes texts first."""
    num_sequences: tuple[int, ...]
    """Numbers of streams that decode together."""
    num_texts_tokens: int
    """Tokens of a completion."""
    max_batched_tokens: int
    sizes: tuple[Size, ...]
    """The sizes of the steps that are timed."""


FULL = Subjects(
    device="cuda",
    targets={
        "1B": GrownSize(hidden_size=2048, intermediate_size=8192, num_layers=16),
        "8B": GrownSize(hidden_size=4096, intermediate_size=14336, num_layers=32),
    },
    num_sequences=(1, 8, 32),
    num_texts_tokens=96,
    max_batched_tokens=2048,
    sizes=(*VERIFY_SIZES, *MORE_SIZES),
)
SMALL = Subjects(
    device="cpu",
    targets={"6M": GrownSize(hidden_size=256, intermediate_size=704, num_layers=6)},
    num_sequences=(1, 2),
    num_texts_tokens=6,
    max_batched_tokens=256,
    sizes=((1, 1), (2, 16)),
)


def choose_subjects(*, is_small: bool) -> Subjects:
    return SMALL if is_small else FULL


def grown_module(subjects: Subjects, name: str) -> PreTrainedModel:
    """The bundled target grown on the device, in bf16, with the same weights each time."""
    source = bundled.resolve(bundled.TARGET_NAME)
    small = LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    module = grow(small.to(subjects.device), subjects.targets[name])  # type: ignore[arg-type]
    attention.register()
    module.set_attn_implementation(attention.ATTENTION_NAME)
    return module


def grown_target(subjects: Subjects, name: str) -> Model:
    """The target that `grown_module` makes, to be served."""
    return make_model(bundled.resolve(bundled.TARGET_NAME), grown_module(subjects, name))


def bundled_draft(subjects: Subjects) -> Model:
    """The bundled draft, in the target's precision."""
    name = bundled.resolve(bundled.DRAFT_NAME)
    return load_model(name, dtype="bfloat16", device=subjects.device)


def find_kernels(model: Model) -> dict[int, str]:
    """The block sizes that have a fused kernel for every layer, and which it is."""
    kernels = {size: [layer.kernel for layer in model.make_cache(1, size)] for size in BLOCK_SIZES}
    return {size: type(found[0]).__name__ for size, found in kernels.items() if None not in found}


def cache_options(model: Model, subjects: Subjects) -> CacheOptions:
    """The smallest blocks that have a fused kernel; every text is computed by itself."""
    return CacheOptions(
        block_size=min(find_kernels(model), default=BLOCK_SIZES[0]),
        max_model_len=MAX_TOKENS,
        max_num_seqs=2 * max(subjects.num_sequences),
        prefix_caching=False,
    )


def make_target(model: Model, subjects: Subjects, *, ranks: Ranks | None = None) -> Target:
    return Target(
        model,
        cache_options(model, subjects),
        max_batched_tokens=subjects.max_batched_tokens,
        ranks=ranks,
    )


def make_drafter(model: Model, subjects: Subjects) -> ModelDrafter:
    return ModelDrafter(
        model, cache_options(model, subjects), max_batched_tokens=subjects.max_batched_tokens
    )


def record_graphs(subjects: Subjects, *workers: Target | ModelDrafter) -> None:
    """Have steps run as graphs, on a GPU: compiling for a CPU takes a minute."""
    if subjects.device == "cuda":
        for worker in workers:
            worker.start_compiling().join()


def free_memory(subjects: Subjects) -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if subjects.device == "cuda":
        torch.cuda.empty_cache()


def time_sizes(
    notebook: Notebook, target: Target, what: str, sizes: Sequence[Size], *, budget_s: float
) -> tuple[StepTime, ...]:
    """The times of steps of these sizes; those that there was no time for are noted."""
    timing = StepTiming(sizes, target.time_step, budget_s=budget_s)
    while not timing.is_done:
        timing.time_one()
    timed = {(time.num_sequences, time.num_tokens) for time in timing.times}
    for size in sizes:
        if size not in timed:
            notebook.skip(f"{what}: {size[1]} tokens of {size[0]} sequences")
    return timing.times


@contextmanager
def as_transformers_runs_it(module: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The same weights with attention and cache of transformers' own, for a while."""
    module.set_attn_implementation(OWN_ATTENTION)
    try:
        yield module
    finally:
        module.set_attn_implementation(attention.ATTENTION_NAME)


def make_prompts(num_prompts: int) -> list[list[int]]:
    """Code as the bundled pair was trained on, from files that it has not seen, as token ids."""
    tokenizer = AutoTokenizer.from_pretrained(bundled.resolve(bundled.TARGET_NAME))
    return [tokenizer.encode(text) for text in held_out_prompts(Corpus.load(), num_prompts)]
