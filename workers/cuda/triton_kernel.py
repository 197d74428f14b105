"""Fused attention over the paged cache on CUDA devices, in Triton, which torch brings along.

`torch.nn.attention.varlen` takes a block table in newer releases only, and not with every backend
and block size. This one serves everywhere else, for every block size, soft caps and sinks too.
Where it cannot be had, or does not agree with plain attention, the gather path stays in charge.
"""

import importlib
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.errors import first_line
from workers.paged_kernel import LayerSpec, ScoreRule, VarlenBatch, probe_error

logger = logging.getLogger(__name__)

MAX_HEAD_DIM = 256
PROBE_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 1e-2}
"""Outputs are of order one: a wrong mask is off by far more."""
MIN_BLOCK_M = 16
"""Rows of a program: the fewest that tensor cores multiply; a verification has few."""
TILE_ELEMENTS = 8192
"""Keys of a tile times their dimension, so that a tile fits a multiprocessor's shared memory."""

NO_WINDOW = 2**30
"""More tokens than any context has, so that one compiled kernel serves with and without windows."""
NUM_STAGES = 2
"""Tiles that are loaded ahead, each in shared memory of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonKernel:
    """The kernel for one block size."""

    block_size: int
    paged_attention: Any
    """The function of `triton_attention`."""

    @classmethod
    def find(
        cls, spec: LayerSpec, *, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> "TritonKernel | None":
        """The kernel if it works here for these shapes, else None."""
        if dtype not in PROBE_TOLERANCES or max(spec.key_dim, spec.value_dim) > MAX_HEAD_DIM:
            return None
        try:
            module = importlib.import_module("workers.cuda.triton_attention")
            kernel = cls(block_size=block_size, paged_attention=module.paged_attention)
            error = probe_error(kernel, spec, dtype=dtype, device=device)
        except Exception as reason:  # its compiler has errors of its own
            logger.warning("there is no Triton attention here: %s", first_line(reason))
            return None
        if not error <= PROBE_TOLERANCES[dtype]:
            logger.warning("the Triton attention is off by %.3g and is not used", error)
            return None
        return kernel

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: VarlenBatch, rule: ScoreRule
    ) -> Tensor:
        """See `PagedKernel`."""
        query = query if query.stride(-1) == 1 else query.contiguous()
        output = query.new_empty(*query.shape[:2], values.shape[2])
        with torch.cuda.device_of(query):  # Triton launches on the current one
            self._launch(query, keys, values, output, batch, rule)
        return output

    def _launch(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        output: Tensor,
        batch: VarlenBatch,
        rule: ScoreRule,
    ) -> None:
        _, num_kv_heads, key_dim = keys.shape
        value_dim = values.shape[2]
        heads_per_kv = query.shape[1] // num_kv_heads
        block_key, block_value = (max(16, _next_power_of_two(d)) for d in (key_dim, value_dim))
        block_m = max(MIN_BLOCK_M, _next_power_of_two(heads_per_kv))
        queries_per_block = block_m // heads_per_kv
        num_sequences = len(batch.context_lens)
        num_blocks = len(query) // queries_per_block + num_sequences
        self.paged_attention[num_blocks, num_kv_heads](
            query,
            keys,
            values,
            output,
            output if rule.sinks is None else rule.sinks,
            batch.query_starts,
            batch.context_lens,
            batch.block_table,
            num_sequences,
            rule.scale,
            NO_WINDOW if rule.window is None else rule.window,
            query.stride(0),
            query.stride(1),
            batch.block_table.stride(0),
            NUM_KV_HEADS=num_kv_heads,
            G=heads_per_kv,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            BLOCK_SIZE=self.block_size,
            SOFTCAP=rule.softcap or 0.0,
            HAS_SINKS=rule.sinks is not None,
            BLOCK_Q=queries_per_block,
            BLOCK_M=block_m,
            BLOCK_N=max(16, min(128, TILE_ELEMENTS // max(block_key, block_value))),
            BLOCK_KEY=block_key,
            BLOCK_VALUE=block_value,
            num_stages=NUM_STAGES,
        )


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
