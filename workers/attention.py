"""Attention over a paged KV cache and a flattened batch, for any transformers decoder.

A batch is flattened: the new tokens of all sequences stand one after another on one axis, without
padding, as a model batch of one. The model's own code projects them; `paged_attention`, registered
with transformers under `ATTENTION_NAME`, writes their keys and values to the cache and lets each
token attend to its own sequence only. What is the same for all layers of a step is prepared once:
see `step_inputs`, which has the legend of shapes too.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from workers.errors import UnsupportedModelError
from workers.paged_kernel import ScoreRule
from workers.step_inputs import AttentionBatch, LayerCache

ATTENTION_NAME = "tandem_paged"


class AttentionObserver(ABC):
    """Stands in for an AttentionBatch where a model is looked at, not served."""

    @abstractmethod
    def observe(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        rule: ScoreRule,
    ) -> Tensor:
        """The output of the layer's attention.  # [1, H, N, D] -> [1, N, H, D]"""


def layer_index(module: nn.Module) -> int:
    """The number of the layer that an attention module belongs to."""
    index = module.layer_idx
    assert isinstance(index, int)
    return index


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_batch: AttentionBatch | AttentionObserver | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every layer; masks are for observers only.

    Shapes: query [1, H, N, D], key and value [1, K, N, D]; result [1, N, H, D].
    """
    if attention_batch is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not pass its caller's arguments on to the attention "
            "interface, so the cache cannot reach it"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = ScoreRule(scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux)
    if isinstance(attention_batch, AttentionObserver):
        return attention_batch.observe(module, query, key, value, attention_mask, rule), None
    layer = attention_batch.layers[layer_index(module)]
    layer.keys.index_copy_(0, attention_batch.slot_mapping, key[0].transpose(0, 1))
    layer.values.index_copy_(0, attention_batch.slot_mapping, value[0].transpose(0, 1))
    batch = attention_batch.cut_for(layer)
    if layer.kernel is not None:
        assert batch.varlen is not None
        output = layer.kernel(
            query[0].transpose(0, 1), layer.keys, layer.values, batch.varlen, rule
        )
        return output[None], None
    return _gather_attention(query[0], layer, batch, rule)[None], None


def _gather_attention(
    query: Tensor, layer: LayerCache, batch: AttentionBatch, rule: ScoreRule
) -> Tensor:
    """Gather each group's context from the cache and attend.  # [H, N, D] -> [N, H, D]"""
    outputs = [
        _group_attention(query, layer, batch, index, rule) for index in range(len(batch.groups))
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output if batch.output_index is None else output[batch.output_index]


def _group_attention(
    query: Tensor, layer: LayerCache, batch: AttentionBatch, index: int, rule: ScoreRule
) -> Tensor:
    """One group's attention.  # [H, N, D] -> [B * Q, H, D_value]

    The G query heads of a key head are folded into the query axis, so that keys and values are
    never repeated.
    """
    group = batch.groups[index]
    batch_size, num_queries = group.query_positions.shape
    num_heads, _, dim = query.shape
    num_kv_heads = layer.keys.shape[1]
    heads_per_kv = num_heads // num_kv_heads
    if group.query_index is not None:
        query = query[:, group.query_index]
    folded = (
        query.reshape(num_kv_heads, heads_per_kv, batch_size, num_queries, dim)
        .permute(2, 0, 1, 3, 4)
        .reshape(batch_size, num_kv_heads, heads_per_kv * num_queries, dim)
    )
    slots = group.slots.reshape(-1)
    context_shape = (batch_size, group.slots.shape[1], num_kv_heads, -1)
    keys = layer.keys.index_select(0, slots).view(context_shape).transpose(1, 2)
    values = layer.values.index_select(0, slots).view(context_shape).transpose(1, 2)
    mask = batch.mask(index, heads_per_kv, rule.window)
    if rule.softcap is None and rule.sinks is None:
        output = F.scaled_dot_product_attention(
            folded, keys, values, attn_mask=mask, scale=rule.scale
        )
    else:
        output = _explicit_attention(folded, keys, values, mask, rule, num_queries)
    return (
        output.view(batch_size, num_kv_heads, heads_per_kv, num_queries, -1)
        .permute(0, 3, 1, 2, 4)
        .reshape(batch_size * num_queries, num_heads, -1)
    )


def _explicit_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, rule: ScoreRule, num_queries: int
) -> Tensor:
    """Attention with a soft cap (Gemma 2) or sinks (GPT-OSS), which SDPA does not know.

    Shapes: query [B, K, G * Q, D], keys and values [B, K, C, D], mask [B, 1, G * Q, C].
    """
    scores = (query @ keys.transpose(-1, -2)) * rule.scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    scores = scores.masked_fill(~mask, float("-inf")).float()
    if rule.sinks is not None:
        batch_size, num_kv_heads, num_rows, _ = scores.shape
        sinks = rule.sinks.float().view(1, num_kv_heads, -1, 1).expand(batch_size, -1, -1, -1)
        sinks = sinks.repeat_interleave(num_queries, dim=2)  # [B, K, G * Q, 1]
        assert sinks.shape[2] == num_rows
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[2]]
    return weights.to(values.dtype) @ values


def register() -> None:
    """Make the function known to transformers; done once, when this package loads a model."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
