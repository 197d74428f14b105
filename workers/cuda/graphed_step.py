"""A model's forward as CUDA graphs, for steps of few tokens, whose time launching kernels takes.

A graph replays the same kernels on the same addresses, so a step is copied into tensors of the next
larger of a few sizes. The tokens that these have too many form a sequence of their own, which
writes to a block that no other has. Larger steps, prompts mostly, are run by the model itself.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.cpu import step_probe
from workers.errors import first_line
from workers.model import Model
from workers.paged_kernel import VarlenBatch
from workers.step_inputs import AttentionBatch, LayerCache, StepInputs

logger = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""The numbers of tokens that there is a graph for. Beyond the last, a step takes what launching its
kernels takes: on an H200, 12 ms where a graph takes 5 (a target of 1B), or 26 and 19 (8B)."""
NUM_WARM_UPS = 2
"""Runs before a recording, in which libraries allocate what they need."""

Replay = Callable[[], Tensor]
Record = Callable[[Callable[[], Tensor]], Replay]
"""Turns a function that launches kernels into one that launches the same ones again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """The cache that graphs are recorded for."""

    layers: Sequence[LayerCache]
    block_size: int
    max_model_len: int
    spare_block: int
    """A block that no sequence is given, and that holds finite numbers."""

    @property
    def max_blocks(self) -> int:
        """The most blocks that a sequence has."""
        return -(-self.max_model_len // self.block_size)


class GraphedStep:
    """Runs a step by the smallest graph that has room for it."""

    def __init__(
        self, model: Model, cache: CacheShape, record: Record, sizes: Sequence[int]
    ) -> None:
        """Record all graphs; no other work may be on the device meanwhile."""
        self._forward = model.forward
        # the largest first: the others find room in its memory
        largest_first = [_Graph(model, cache, size, record) for size in sorted(sizes)[::-1]]
        self._graphs = largest_first[::-1]

    @torch.inference_mode()
    def __call__(self, inputs: StepInputs) -> Tensor:
        """Run a step as Model.forward does; the next one overwrites the result.

        # [num_rows, vocab]
        """
        num_tokens = inputs.tokens.shape[1]
        graph = next((graph for graph in self._graphs if graph.size >= num_tokens), None)
        return self._forward(inputs) if graph is None else graph(inputs)


class _Graph:
    """The forward of exactly `size` tokens."""

    def __init__(self, model: Model, cache: CacheShape, size: int, record: Record) -> None:
        self.size = size
        self._spare_block = cache.spare_block
        self._spare_slot = cache.spare_block * cache.block_size
        self._inputs = _empty_inputs(cache, size, model.device)
        self._fill_spare(num_tokens=0, num_sequences=0)
        self._replay = record(lambda: model.forward(self._inputs))

    def __call__(self, inputs: StepInputs) -> Tensor:
        self._fill(inputs)
        return self._replay()[: len(inputs.logit_rows)]

    def _fill(self, inputs: StepInputs) -> None:
        own, varlen = self._inputs.attention.varlen, inputs.attention.varlen
        assert own is not None
        assert varlen is not None
        num_sequences, num_blocks = varlen.block_table.shape
        num_tokens = inputs.tokens.shape[1]
        self._inputs.tokens[:, :num_tokens] = inputs.tokens
        self._inputs.positions[:, :num_tokens] = inputs.positions
        self._inputs.logit_rows[: len(inputs.logit_rows)] = inputs.logit_rows
        self._inputs.attention.slot_mapping[:num_tokens] = inputs.attention.slot_mapping
        own.query_starts[: num_sequences + 1] = varlen.query_starts
        own.context_lens[:num_sequences] = varlen.context_lens
        own.block_table[:num_sequences, :num_blocks] = varlen.block_table
        self._fill_spare(num_tokens=num_tokens, num_sequences=num_sequences)

    def _fill_spare(self, *, num_tokens: int, num_sequences: int) -> None:
        """A sequence of the tokens that are too many, then sequences without tokens."""
        own = self._inputs.attention.varlen
        assert own is not None
        num_spare = self.size - num_tokens
        self._inputs.attention.slot_mapping[num_tokens:] = self._spare_slot
        own.query_starts[num_sequences + 1 :] = self.size
        own.context_lens[num_sequences:] = max(num_spare, 1)
        own.block_table[num_sequences] = self._spare_block


def _empty_inputs(cache: CacheShape, size: int, device: torch.device) -> StepInputs:
    """A step of `size` tokens, of as many sequences at most, and of one more that pads them."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    max_blocks = max(cache.max_blocks, -(-size // cache.block_size))
    varlen = VarlenBatch(
        query_starts=zeros(size + 2, dtype=torch.int32),
        context_lens=zeros(size + 1, dtype=torch.int32),
        block_table=zeros(size + 1, max_blocks, dtype=torch.int32),
        max_query_len=size,
        max_context_len=max_blocks * cache.block_size,
    )
    batch = AttentionBatch(
        layers={layer.layer: layer for layer in cache.layers},
        slot_mapping=zeros(size),
        varlen=varlen,
    )
    return StepInputs(
        tokens=zeros(1, size), positions=zeros(1, size), logit_rows=zeros(size), attention=batch
    )


def obtain(model: Model, cache: CacheShape) -> GraphedStep | None:
    """The model's forward as CUDA graphs, None where it cannot be had.

    Overwrites some of the cache, and may not run beside other work: call it before the first step.
    """
    if model.device.type != "cuda" or any(layer.kernel is None for layer in cache.layers):
        return None  # what the gather path launches depends on the step
    if model.irregularity is not None:
        return None
    sizes = [size for size in SIZES if size <= cache.max_model_len]
    try:
        with torch.cuda.device(model.device):  # a thread begins with the first
            step = GraphedStep(model, cache, _record_into(torch.cuda.graph_pool_handle()), sizes)
        error = step_probe.probe_error(
            step,
            model,
            block_size=cache.block_size,
            layers=cache.layers,
            probes=(*step_probe.PROBES, *(((0, size),) for size in sizes)),
        )
    except Exception as failure:  # whatever it is, the model's own forward serves
        logger.warning("%s has no CUDA graphs: %s", model.name, first_line(failure))
        return None
    if not error <= step_probe.TOLERANCES[model.dtype]:
        logger.warning("the CUDA graphs of %s are off by %.3g: not used", model.name, error)
        return None
    logger.info("%s runs steps of up to %d tokens as CUDA graphs", model.name, sizes[-1])
    return step


def _record_into(pool: Any) -> Record:
    """Recordings that share their memory: no two of them run at a time."""

    def record(run: Callable[[], Tensor]) -> Replay:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = run()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay

    return record
