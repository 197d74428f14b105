"""MPT over a paged cache, with its position bias inside the keys.

MPT adds ALiBi to its scores, slope_h * (j - i) for query i and key j of head h (Press et al., 2022,
arXiv:2108.12409), in code of its own that calls no attention function. A softmax is blind to
slope_h * i, which is the same for all keys of a query, and slope_h * j is a product like any other:

    (q, slope_h / scale) . (k, j) * scale = q . k * scale + slope_h * j

So queries and keys are longer by a few numbers, and any attention will do. Both factors are written
as sums of two numbers that bfloat16 holds, so that the product is as exact there as in float32.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import MptForCausalLM
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.mpt.modeling_mpt import MptAttention

from workers.attention import paged_attention

NUM_ADDED = 8
"""How much longer queries and keys are: four products, and zeros that keep rows aligned."""
LOW_PART = 256
"""Positions below this are whole numbers of bfloat16."""


class PagedMpt(MptForCausalLM):
    """MptForCausalLM with the same weights, over the paged cache."""

    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor,
        logits_to_keep: Tensor,
        use_cache: bool = False,
        **attention_arguments: Any,
    ) -> CausalLMOutput:
        """Run the new tokens; arguments as those of `Model.forward`."""
        assert not use_cache
        hidden = self.transformer.wte(input_ids)
        blocks: Iterable[Any] = self.transformer.blocks  # typed as modules, and no more
        for block in blocks:
            hidden = hidden + _attend(
                block.attn, block.norm_1(hidden), position_ids, **attention_arguments
            )
            hidden = block.ffn(block.norm_2(hidden), hidden)
        hidden = self.transformer.norm_f(hidden)[:, logits_to_keep]
        return CausalLMOutput(logits=self.lm_head(hidden))


def _attend(
    layer: MptAttention, hidden: Tensor, positions: Tensor, **attention_arguments: Any
) -> Tensor:
    """Attend in one layer.  # [1, N, hidden] -> [1, N, hidden]"""
    mixed = layer.Wqkv(hidden)
    if layer.clip_qkv:
        mixed = mixed.clamp(min=-layer.clip_qkv, max=layer.clip_qkv)
    query, key, value = mixed.view(*hidden.shape[:2], 3, layer.n_heads, layer.head_dim).unbind(2)
    scale = float(layer.softmax_scale or layer.head_dim**-0.5)
    output, _ = paged_attention(
        layer,
        torch.cat([query, _slope_part(layer, scale, query)], dim=-1).transpose(1, 2),
        torch.cat([key, _position_part(positions, key)], dim=-1).transpose(1, 2),
        value.transpose(1, 2),
        None,
        scaling=scale,
        **attention_arguments,
    )
    attended: Tensor = layer.out_proj(output.flatten(2))
    return attended


def _slope_part(layer: MptAttention, scale: float, query: Tensor) -> Tensor:
    """The columns added to queries: slope / scale, in two parts.  # [1, N, H, NUM_ADDED]"""
    slopes = _slopes(layer.n_heads, query.device) / scale  # [H]
    high = slopes.to(torch.bfloat16).float()
    low = slopes - high
    part = query.new_zeros(*query.shape[:-1], NUM_ADDED)
    part[..., :4] = torch.stack([high * LOW_PART, low * LOW_PART, high, low], dim=-1)
    return part


def _position_part(positions: Tensor, key: Tensor) -> Tensor:
    """The columns added to keys: their position, in two parts.  # [1, N, H, NUM_ADDED]"""
    high, low = positions // LOW_PART, positions % LOW_PART  # [1, N]
    part = key.new_zeros(*key.shape[:-1], NUM_ADDED)
    part[..., :4] = torch.stack([high, high, low, low], dim=-1)[:, :, None].to(key.dtype)
    return part


def _slopes(num_heads: int, device: torch.device) -> Tensor:
    """The slope of each head, as `build_mpt_alibi_tensor` of transformers has them.  # [H]"""
    num_steps = 1 << (num_heads - 1).bit_length()  # the next power of two
    steps = torch.arange(1, num_steps + 1, device=device)
    slopes = torch.pow(2.0, -8.0 * steps / num_steps)
    if num_steps != num_heads:
        slopes = torch.cat([slopes[1::2], slopes[::2]])[:num_heads]
    return slopes
