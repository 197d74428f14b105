"""Attention over a paged KV cache and a flattened batch, for any transformers decoder.

A batch is flattened: the new tokens of all sequences stand one after another on one axis, without
padding, as a model batch of one. The model's own code projects them; `paged_attention`, registered
with transformers under `ATTENTION_NAME`, writes their keys and values to the cache and lets each
token attend to its own sequence only. Everything that is the same for all layers of a step is
prepared once, in `AttentionBatch`.

Legend: N new tokens of all sequences, H query heads, K key/value heads, G = H / K, D head size;
in a group: B sequences, Q queries each, C context slots each.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface

from workers.errors import UnsupportedModelError
from workers.paged_kernel import PagedKernel, ScoreRule, VarlenBatch

ATTENTION_NAME = "tandem_paged"

# Sequences with more new tokens than this attend alone; fewer are padded and batched together.
MAX_BATCHED_QUERIES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """The shape of one attention layer's cache, as seen in the model's own forward."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    is_plain: bool
    """Whether the weights are a masked softmax: no soft cap, no sinks."""

    def slot_bytes(self, dtype: torch.dtype) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """Keys and values of one layer, slot by slot."""

    keys: Tensor
    """# [num_slots, num_kv_heads, key_dim]"""
    values: Tensor
    """# [num_slots, num_kv_heads, value_dim]"""
    kernel: PagedKernel | None = None
    """The fused kernel, where this device, dtype and shape have one that was seen to work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The new tokens of one sequence in a batch."""

    cached_len: int
    num_new: int
    block_table: Sequence[int]
    """Blocks for cached_len + num_new tokens, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGroup:
    """Sequences whose attention is one call: their queries and contexts padded to a rectangle."""

    query_index: Tensor | None
    """Where the queries stand in the flattened batch, padding repeats a query.  # [B, Q]
    None when the group is the whole batch, unpadded and in order."""
    slots: Tensor
    """Cache slots of the context, padding repeats the first: a slot never written may hold NaN,
    which survives a weight of zero.  # [B, C]"""
    query_positions: Tensor
    """# [B, Q]"""

    def mask(self, heads_per_kv: int, window: int | None) -> Tensor:
        """Which context slots a query sees: those at or before it, within the window.

        Padding of the context lies after every query, so the causal rule hides it.
        # [B, 1, G * Q, C]
        """
        batch_size, num_queries = self.query_positions.shape
        key_positions = torch.arange(self.slots.shape[1], device=self.slots.device)
        positions = self.query_positions[:, :, None]
        mask = key_positions <= positions
        if window is not None:
            mask &= key_positions > positions - window
        mask = mask[:, None].expand(batch_size, heads_per_kv, num_queries, -1)
        return mask.reshape(batch_size, 1, heads_per_kv * num_queries, -1)


@dataclass(slots=True, kw_only=True)
class AttentionBatch:
    """What every layer needs to know of a step."""

    layers: Sequence[LayerCache]
    slot_mapping: Tensor
    """The slot each new token is written to.  # [N]"""
    groups: tuple[AttentionGroup, ...]
    output_index: Tensor | None
    """Where each token's output stands among the groups' padded outputs.  # [N]"""
    varlen: VarlenBatch | None = None
    _masks: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict)

    def mask(self, group_index: int, heads_per_kv: int, window: int | None) -> Tensor:
        """The group's mask, built once per step for all layers alike."""
        key = (group_index, heads_per_kv, window)
        if key not in self._masks:
            self._masks[key] = self.groups[group_index].mask(heads_per_kv, window)
        return self._masks[key]


def build_batch(
    layers: Sequence[LayerCache],
    chunks: Sequence[Chunk],
    *,
    block_size: int,
    device: torch.device,
) -> AttentionBatch:
    """Prepare a step for the chunks, in the order in which their tokens are flattened."""
    slot_mapping = [slot for chunk in chunks for slot in _new_slots(chunk, block_size)]
    varlen = None
    groups: tuple[AttentionGroup, ...] = ()
    output_index = None
    if any(layer.kernel is not None for layer in layers):
        varlen = _varlen_batch(chunks, device)
    if any(layer.kernel is None for layer in layers):
        all_slots = [_all_slots(chunk, block_size) for chunk in chunks]
        groups, output_index = _build_groups(chunks, all_slots, device)
    return AttentionBatch(
        layers=layers,
        slot_mapping=torch.tensor(slot_mapping, device=device),
        groups=groups,
        output_index=output_index,
        varlen=varlen,
    )


def _new_slots(chunk: Chunk, block_size: int) -> list[int]:
    """Of the new tokens: they are few, and a list is made sooner than an array."""
    positions = range(chunk.cached_len, chunk.cached_len + chunk.num_new)
    return [chunk.block_table[p // block_size] * block_size + p % block_size for p in positions]


def _all_slots(chunk: Chunk, block_size: int) -> NDArray[np.int64]:
    """Of the whole context."""
    num_tokens = chunk.cached_len + chunk.num_new
    blocks = np.asarray(chunk.block_table[: -(-num_tokens // block_size)], dtype=np.int64)
    slots = blocks[:, None] * block_size + np.arange(block_size)
    return slots.reshape(-1)[:num_tokens]


def _build_groups(
    chunks: Sequence[Chunk], all_slots: Sequence[NDArray[np.int64]], device: torch.device
) -> tuple[tuple[AttentionGroup, ...], Tensor | None]:
    starts = np.cumsum([0] + [chunk.num_new for chunk in chunks])
    output_index = np.empty(starts[-1], dtype=np.int64)
    groups, num_outputs = [], 0
    for members in _group_members(chunks):
        num_queries = max(chunks[m].num_new for m in members)
        num_slots = max(len(all_slots[m]) for m in members)
        query_index = np.empty((len(members), num_queries), dtype=np.int64)
        positions = np.empty_like(query_index)
        slots = np.empty((len(members), num_slots), dtype=np.int64)
        for row, m in enumerate(members):
            offsets = np.minimum(np.arange(num_queries), chunks[m].num_new - 1)
            query_index[row] = starts[m] + offsets
            positions[row] = chunks[m].cached_len + offsets
            slots[row, : len(all_slots[m])] = all_slots[m]
            slots[row, len(all_slots[m]) :] = all_slots[m][0]
            first_output = num_outputs + row * num_queries
            output_index[starts[m] : starts[m + 1]] = first_output + np.arange(chunks[m].num_new)
        num_outputs += query_index.size
        groups.append((query_index, slots, positions))
    is_whole = len(groups) == 1 and np.array_equal(groups[0][0].reshape(-1), np.arange(starts[-1]))
    built = tuple(
        AttentionGroup(
            query_index=None if is_whole else torch.from_numpy(query_index).to(device),
            slots=torch.from_numpy(slots).to(device),
            query_positions=torch.from_numpy(positions).to(device),
        )
        for query_index, slots, positions in groups
    )
    return built, None if is_whole else torch.from_numpy(output_index).to(device)


def _group_members(chunks: Sequence[Chunk]) -> list[list[int]]:
    """Chunks that may share a call: few queries each, contexts of similar length.

    Contexts are alike when they are below the same power of two, so that at most half of a
    rectangle is padding.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for index, chunk in enumerate(chunks):
        is_batched = chunk.num_new <= MAX_BATCHED_QUERIES
        context_class = (chunk.cached_len + chunk.num_new - 1).bit_length()
        key = (max(context_class, 6), -1) if is_batched else (0, index)
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _varlen_batch(chunks: Sequence[Chunk], device: torch.device) -> VarlenBatch:
    context_lens = [chunk.cached_len + chunk.num_new for chunk in chunks]
    tables = np.zeros((len(chunks), max(len(c.block_table) for c in chunks)), dtype=np.int32)
    for row, chunk in zip(tables, chunks, strict=True):
        row[: len(chunk.block_table)] = chunk.block_table
    starts = [0, *itertools.accumulate(chunk.num_new for chunk in chunks)]
    return VarlenBatch(
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        block_table=torch.from_numpy(tables).to(device),
        max_query_len=max(chunk.num_new for chunk in chunks),
        max_context_len=max(context_lens),
    )


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
        """What the layer's attention is to be.  # [1, H, N, D] -> [1, N, H, D]"""


def layer_index(module: nn.Module) -> int:
    """Which layer an attention module is of."""
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
    if layer.kernel is not None:
        varlen = attention_batch.varlen
        assert varlen is not None
        output = layer.kernel(query[0].transpose(0, 1), layer.keys, layer.values, varlen, rule)
        return output[None], None
    return _gather_attention(query[0], layer, attention_batch, rule)[None], None


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
