"""PyTorch's fused variable-length attention over a block table, where it is to be had (CUDA).

Which backends take a block table, and with which block sizes, differs between releases, so the
kernel is tried once on a small random case against plain attention; whatever fails or disagrees
leaves the gather path in charge.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

PROBE_TOLERANCE = 2e-2
"""In bf16, outputs of order one: a wrong mask is off by far more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenKernel:
    """A callable view of `torch.nn.attention.varlen.varlen_attn` for one block size."""

    block_size: int
    varlen_attn: Any

    @classmethod
    def find(
        cls,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "VarlenKernel | None":
        """The kernel if it works here for these shapes, else None."""
        if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
            return None
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError:
            return None
        kernel = cls(block_size=block_size, varlen_attn=varlen_attn)
        try:
            error = kernel._probe(num_heads, num_kv_heads, head_dim, dtype, device)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as reason:
            logger.info("varlen_attn with a block table is not available: %s", reason)
            return None
        if error > PROBE_TOLERANCE:
            logger.warning("varlen_attn is off by %.3g on a test case and is not used", error)
            return None
        return kernel

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        query_starts: Tensor,
        context_lens: Tensor,
        block_table: Tensor,
        max_query_len: int,
        max_context_len: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Shapes: query [N, H, D], keys and values [num_slots, K, D]; result [N, H, D]."""
        paged = (-1, self.block_size, *keys.shape[1:])
        output: Tensor = self.varlen_attn(
            query.contiguous(),
            keys.view(paged),
            values.view(paged),
            query_starts,
            None,
            max_query_len,
            max_context_len,
            scale=scale,
            # the window counts the query itself, the kernel the tokens left of it
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.shape[1] != keys.shape[1],
            seqused_k=context_lens,
            block_table=block_table,
        )
        return output

    def _probe(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> float:
        """Largest difference to plain attention: 3 new tokens on 2 blocks, full and windowed."""
        generator = torch.Generator(device=device).manual_seed(0)
        num_context, num_new = self.block_size + 2, 3

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device).to(dtype)

        query = random(num_new, num_heads, head_dim)
        keys = random(3 * self.block_size, num_kv_heads, head_dim)
        values = random(3 * self.block_size, num_kv_heads, head_dim)
        table = torch.tensor([[2, 0]], dtype=torch.int32, device=device)
        slots = torch.cat(
            [torch.arange(b * self.block_size, (b + 1) * self.block_size) for b in (2, 0)]
        )[:num_context].to(device)
        queries = torch.arange(num_context - num_new, num_context, device=device)[:, None]
        positions = torch.arange(num_context, device=device)[None]
        largest = 0.0
        for window in (None, 2):
            output = self(
                query, keys, values,
                query_starts=torch.tensor([0, num_new], dtype=torch.int32, device=device),
                context_lens=torch.tensor([num_context], dtype=torch.int32, device=device),
                block_table=table,
                max_query_len=num_new, max_context_len=num_context,
                scale=head_dim**-0.5, window=window,
            )  # fmt: skip
            mask = positions <= queries
            if window is not None:
                mask &= positions > queries - window
            expected = F.scaled_dot_product_attention(
                query.transpose(0, 1)[None].float(),
                keys[slots].transpose(0, 1)[None].float(),
                values[slots].transpose(0, 1)[None].float(),
                attn_mask=mask,
                enable_gqa=True,
            )[0].transpose(0, 1)
            largest = max(largest, (output.float() - expected).abs().max().item())
        return largest
