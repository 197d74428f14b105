"""PyTorch's fused variable-length attention over a block table, where it is to be had (CUDA).

Which backends take a block table, and with which block sizes, differs between releases, so the
kernel is tried once on a small random case against plain attention; whatever fails or disagrees
leaves the gather path in charge.
"""

import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.paged_kernel import LayerSpec, ScoreRule, VarlenBatch, probe_error

logger = logging.getLogger(__name__)

PROBE_TOLERANCE = 2e-2
"""The error that a probe may have in bf16, with outputs of order one: a wrong mask is off by far
more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenKernel:
    """A callable view of `torch.nn.attention.varlen.varlen_attn` for one block size."""

    block_size: int
    varlen_attn: Any

    @classmethod
    def find(
        cls, spec: LayerSpec, *, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> "VarlenKernel | None":
        """The kernel if it works here for these shapes, else None."""
        if not spec.is_plain or spec.key_dim != spec.value_dim:
            return None
        if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
            return None
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError:
            return None
        if "block_table" not in inspect.signature(varlen_attn).parameters:
            return None  # torch 2.11 has the function, for contiguous keys only
        kernel = cls(block_size=block_size, varlen_attn=varlen_attn)
        try:
            error = probe_error(kernel, spec, dtype=dtype, device=device)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as reason:
            logger.info("varlen_attn with a block table is not available: %s", reason)
            return None
        if error > PROBE_TOLERANCE:
            logger.warning("varlen_attn is off by %.3g on a test case and is not used", error)
            return None
        return kernel

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: VarlenBatch, rule: ScoreRule
    ) -> Tensor:
        """See `PagedKernel`."""
        paged = (-1, self.block_size, *keys.shape[1:])
        output: Tensor = self.varlen_attn(
            query.contiguous(),
            keys.view(paged),
            values.view(paged),
            batch.query_starts,
            None,
            batch.max_query_len,
            batch.max_context_len,
            scale=rule.scale,
            # the window counts the query itself, the kernel the tokens left of it
            window_size=(-1 if rule.window is None else rule.window - 1, 0),
            enable_gqa=query.shape[1] != keys.shape[1],
            seqused_k=batch.context_lens,
            block_table=batch.block_table,
        )
        return output
