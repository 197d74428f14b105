"""A check, before another way to run a model's forward serves, that it gives the model's logits."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workers.model import Model
from workers.step_inputs import LayerCache, StepInputs, step_inputs
from workers.step_plan import StepPlan

# The largest difference of logits to the model's own, relative to the largest logit.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}
# (cached tokens, new tokens) of each sequence, with at least two of everything that may vary
EXAMPLE = ((19, 3), (2, 2))
PROBES = (EXAMPLE, ((5, 1),), ((0, 9),), ((17, 5),), ((3, 1), (9, 1), (30, 1)))


def make_inputs(
    model: Model,
    lens: Sequence[tuple[int, int]],
    *,
    block_size: int,
    layers: Sequence[LayerCache] | None = None,
) -> StepInputs:
    """A step of sequences with (cached, new) tokens.

    Over a cache of its own, or the first blocks of `layers`, which are overwritten. Raises
    ValueError if these are too few.
    """
    blocks_each = max(-(-(cached + new) // block_size) for cached, new in lens)
    num_slots = blocks_each * len(lens) * block_size
    layers = layers or model.make_cache(blocks_each * len(lens), block_size)
    for layer in layers:
        if len(layer.keys) < num_slots:
            raise ValueError(f"a test case of {num_slots} tokens; the cache has {len(layer.keys)}")
        layer.keys[:num_slots] = 0
        layer.values[:num_slots] = 0
    plan = StepPlan()
    for index, (cached, new) in enumerate(lens):
        first = len(plan.tokens)
        plan.add_chunk(
            [(7 * token) % model.vocab_size for token in range(first, first + new)],
            cached_len=cached,
            block_table=range(index * blocks_each, (index + 1) * blocks_each),
            num_logits=new,
        )
    return step_inputs(
        plan, layers, vocab_size=model.vocab_size, block_size=block_size, device=model.device
    )


def probe_error(
    step: Callable[[StepInputs], Tensor],
    model: Model,
    *,
    block_size: int,
    layers: Sequence[LayerCache] | None = None,
    probes: Sequence[Sequence[tuple[int, int]]] = PROBES,
) -> float:
    """The largest difference to the model's own logits, relative to the largest of those."""
    errors = []
    for lens in probes:
        expected, logits = (
            run(make_inputs(model, lens, block_size=block_size, layers=layers)).float()
            for run in (model.forward, step)
        )
        errors.append(float((logits - expected).abs().max() / expected.abs().max()))
    return max(errors)
