"""Fused attention over the paged cache on CPUs: the C++ of `csrc/paged_attention.cpp`.

Where it cannot be had, or does not agree with plain attention, the gather path stays in charge.
"""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.cpu import native
from workers.paged_kernel import LayerSpec, ScoreRule, VarlenBatch, probe_error

logger = logging.getLogger(__name__)

MAX_HEAD_DIM = 256
# Outputs are of order one: a wrong mask is off by far more.
PROBE_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuKernel:
    """The compiled operator for one block size."""

    block_size: int

    @classmethod
    def find(cls, spec: LayerSpec, *, block_size: int, dtype: torch.dtype) -> "CpuKernel | None":
        """The kernel if it works here for these shapes, else None."""
        if dtype not in PROBE_TOLERANCES or max(spec.key_dim, spec.value_dim) > MAX_HEAD_DIM:
            return None
        if not native.load_operators():
            return None
        kernel = cls(block_size=block_size)
        error = probe_error(kernel, spec, dtype=dtype, device=torch.device("cpu"))
        if error > PROBE_TOLERANCES[dtype]:
            logger.warning("the CPU attention kernel is off by %.3g and is not used", error)
            return None
        return kernel

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: VarlenBatch, rule: ScoreRule
    ) -> Tensor:
        """See `PagedKernel`."""
        output: Tensor = torch.ops.tandem.paged_attention(
            query,
            keys,
            values,
            batch.query_starts,
            batch.context_lens,
            batch.block_table,
            self.block_size,
            rule.scale,
            rule.window or 0,
            rule.softcap or 0.0,
            rule.sinks,
        )
        return output
