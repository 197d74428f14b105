"""What a fused attention kernel over the paged cache is given, and how one is tried before use."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """The shape of one attention layer's cache, as seen in the model's own forward."""

    layer: int = field(compare=False)
    """The layer's number in the model."""
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    is_plain: bool
    """Whether the weights are a masked softmax: no soft cap, no sinks."""
    chunk_len: int | None = field(default=None, compare=False)
    """The length of the pieces into which the layer cuts a text, to attend within each; kernels are
    given the pieces as sequences. None for a layer that does not."""

    def slot_bytes(self, dtype: torch.dtype) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRule:
    """How a layer turns query-key products into weights."""

    scale: float
    window: int | None = None
    """Tokens a query sees, itself included."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """Logits of a sink per query head, which takes weight and gives nothing.  # [H]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenBatch:
    """A step in the terms of a fused kernel; all int32 on the device."""

    query_starts: Tensor
    """# [num_sequences + 1]"""
    context_lens: Tensor
    """# [num_sequences]"""
    block_table: Tensor
    """# [num_sequences, max_blocks]"""
    max_query_len: int
    max_context_len: int


class PagedKernel(Protocol):
    """Attention of new tokens, whose keys and values are in the cache already, to their context."""

    @property
    def block_size(self) -> int: ...

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: VarlenBatch, rule: ScoreRule
    ) -> Tensor:
        """Shapes: query [N, H, D], keys and values [num_slots, K, D]; result [N, H, D_value]."""
        ...


def probe_error(
    kernel: PagedKernel, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device
) -> float:
    """Largest difference to plain attention: 3 new tokens on several blocks, full and windowed."""
    generator = torch.Generator(device=device).manual_seed(0)
    num_context, num_new = kernel.block_size + 2, 3
    num_blocks = -(-num_context // kernel.block_size)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    query = random(num_new, spec.num_heads, spec.key_dim)
    keys = random((num_blocks + 1) * kernel.block_size, spec.num_kv_heads, spec.key_dim)
    values = random((num_blocks + 1) * kernel.block_size, spec.num_kv_heads, spec.value_dim)
    block_ids = torch.arange(num_blocks, 0, -1, device=device)
    offsets = torch.arange(kernel.block_size, device=device)
    slots = (block_ids[:, None] * kernel.block_size + offsets).reshape(-1)[:num_context]
    batch = VarlenBatch(
        query_starts=torch.tensor([0, num_new], dtype=torch.int32, device=device),
        context_lens=torch.tensor([num_context], dtype=torch.int32, device=device),
        block_table=block_ids[None].to(torch.int32),
        max_query_len=num_new,
        max_context_len=num_context,
    )
    queries = torch.arange(num_context - num_new, num_context, device=device)[:, None]
    positions = torch.arange(num_context, device=device)[None]
    largest = 0.0
    for window in (None, 2):
        rule = ScoreRule(scale=spec.key_dim**-0.5, window=window)
        output = kernel(query, keys, values, batch, rule)
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
