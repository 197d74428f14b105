"""Steps in tensors of fixed sizes, against the model's own; here a recording is a call.

Recordings themselves need CUDA: tests/workers/cuda/test_gpu.py.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.tiny_models import save_model
from tests.workers.decoding import random_drafts
from tests.workers.test_target import GREEDY, SAMPLED, generate, make_prompt
from workers.cpu import native
from workers.cpu.step_probe import make_inputs
from workers.cuda import graphed_step
from workers.cuda.graphed_step import CacheShape, GraphedStep, Replay
from workers.model import Model, load_model
from workers.paged_model import CacheOptions
from workers.step_inputs import LayerCache
from workers.target import Target

needs_kernel = pytest.mark.skipif(
    not native.load_operators(), reason="no C++ compiler on this machine"
)
BLOCK_SIZE = 4
NUM_BLOCKS = 40
SIZES = (1, 2, 4, 8, 16)
# (cached, new) of each sequence: a size exactly, one less, one more, many, and too many
STEPS = [
    ((5, 1),),
    ((9, 8),),
    ((9, 7),),
    ((9, 9),),
    tuple((index, 1) for index in range(9)),
    ((3, 2), (0, 5), (11, 1)),
    ((2, 17),),
    ((5, 1),),
]


def call_again(run: Callable[[], Tensor]) -> Replay:
    """As a graph would: results at one address."""
    logits = run().clone()
    return lambda: logits.copy_(run())


def make_step(model: Model, layers: tuple[LayerCache, ...]) -> GraphedStep:
    cache = CacheShape(
        layers=layers, block_size=BLOCK_SIZE, max_model_len=64, spare_block=NUM_BLOCKS
    )
    return GraphedStep(model, cache, call_again, SIZES)


def make_layers(model: Model) -> tuple[LayerCache, ...]:
    """A cache of which nothing was written, and a spare block that holds finite numbers."""
    layers = model.make_cache(NUM_BLOCKS + 1, BLOCK_SIZE)
    for layer in layers:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
        layer.keys[NUM_BLOCKS * BLOCK_SIZE :] = 0
        layer.values[NUM_BLOCKS * BLOCK_SIZE :] = 0
    return layers


@needs_kernel
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_padding_changes_neither_logits_nor_cache(
    family: str, tiny_model: Callable[..., Model]
) -> None:
    model = tiny_model(family)
    own, padded = make_layers(model), make_layers(model)
    step = make_step(model, padded)
    for lens in STEPS:
        expected, logits = (
            run(make_inputs(model, lens, block_size=BLOCK_SIZE, layers=layers))
            for run, layers in ((model.forward, own), (step, padded))
        )
        torch.testing.assert_close(logits, expected)
        for own_layer, layer in zip(own, padded, strict=True):
            for ours, theirs in ((layer.keys, own_layer.keys), (layer.values, own_layer.values)):
                of_sequences = slice(NUM_BLOCKS * BLOCK_SIZE)
                torch.testing.assert_close(ours[of_sequences], theirs[of_sequences], equal_nan=True)


@needs_kernel
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_texts_are_the_same(sampling: object, tmp_path: Path) -> None:
    name = save_model(tmp_path)
    cache = CacheOptions(block_size=BLOCK_SIZE, max_num_seqs=8)
    plain, target = (
        Target(load_model(name, dtype="float32", device="cpu"), cache, early_exit_layer=1)
        for _ in range(2)
    )
    paged = target._paged
    shape = CacheShape(
        layers=paged._layers,
        block_size=BLOCK_SIZE,
        max_model_len=target.info.max_model_len,
        spare_block=target.info.num_blocks,
    )
    paged.forward = GraphedStep(paged.model, shape, call_again, SIZES)
    early = paged._early
    assert early is not None
    early.forward = GraphedStep(early.model, replace(shape, layers=early.layers), call_again, SIZES)
    for seed in range(2):
        prompt = make_prompt(seed, 10 + 14 * seed)
        expected = generate(plain, prompt, 20, sampling=sampling)
        assert generate(target, prompt, 20, sampling=sampling) == expected
        drafted = generate(target, prompt, 20, sampling=sampling, drafts=random_drafts(3, seed))
        assert drafted == expected
        assert generate(target, prompt, 20, sampling=sampling, next_k=3) == expected


@needs_kernel
def test_a_step_runs_in_the_smallest_graph_that_holds_it(tiny_model: Callable[..., Model]) -> None:
    model = tiny_model()
    recorded: list[int] = []
    replayed: list[int] = []

    def record(run: Callable[[], Tensor]) -> Replay:
        again = call_again(run)
        size = len(again())
        recorded.append(size)

        def replay() -> Tensor:
            replayed.append(size)
            return again()

        return replay

    layers = make_layers(model)
    cache = CacheShape(
        layers=layers, block_size=BLOCK_SIZE, max_model_len=64, spare_block=NUM_BLOCKS
    )
    step = GraphedStep(model, cache, record, SIZES)
    assert recorded == [16, 8, 4, 2, 1]
    for lens in STEPS:
        step(make_inputs(model, lens, block_size=BLOCK_SIZE, layers=layers))
    assert replayed == [1, 8, 8, 16, 16, 8, 1]  # 17 tokens have none


def test_a_cpu_has_none(tiny_model: Callable[..., Model]) -> None:
    model = tiny_model()
    cache = CacheShape(
        layers=make_layers(model), block_size=BLOCK_SIZE, max_model_len=64, spare_block=NUM_BLOCKS
    )
    assert graphed_step.obtain(model, cache) is None


def test_a_cache_too_small_for_a_test_case_is_left_alone(tiny_model: Callable[..., Model]) -> None:
    model = tiny_model()
    layers = model.make_cache(2, BLOCK_SIZE)
    with pytest.raises(ValueError, match="a test case of 12 tokens; the cache has 8"):
        make_inputs(model, ((9, 1),), block_size=BLOCK_SIZE, layers=layers)
