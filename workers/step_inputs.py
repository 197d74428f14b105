"""A step in tensors: its tokens, and what every attention layer needs to know, prepared once.

Legend: N new tokens of all sequences, H query heads, K key/value heads, G = H / K, D head size;
in a group: B sequences, Q queries each, C context slots each.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.paged_kernel import PagedKernel, VarlenBatch
from workers.recurrent import States, StepStates, step_states
from workers.step_plan import Chunk, StepPlan

UNKNOWN_TOKEN = 0
"""What a draft model runs in place of ids that only its target has; drafts may be worse there."""
# Sequences with more new tokens than this attend alone; fewer are padded and batched together.
MAX_BATCHED_QUERIES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """Keys and values of one layer, slot by slot."""

    layer: int
    """The layer's number in the model."""
    keys: Tensor
    """# [num_slots, num_kv_heads, key_dim]"""
    values: Tensor
    """# [num_slots, num_kv_heads, value_dim]"""
    kernel: PagedKernel | None = None
    """The fused kernel, where this device, dtype and shape have one that was seen to work."""
    chunk_len: int | None = None
    """The length of the pieces into which the layer cuts a text, to attend within each."""


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
    """A step as every attention layer needs it."""

    layers: Mapping[int, LayerCache]
    """The cache of each layer, by the layer's number in the model."""
    slot_mapping: Tensor
    """The slot each new token is written to.  # [N]"""
    groups: tuple[AttentionGroup, ...] = ()
    output_index: Tensor | None = None
    """Where each token's output stands among the groups' padded outputs.  # [N]"""
    varlen: VarlenBatch | None = None
    chunked: Mapping[int, "AttentionBatch"] = field(default_factory=dict)
    """The step for layers that attend within chunks, by the length of these."""
    _masks: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict)

    def cut_for(self, layer: LayerCache) -> "AttentionBatch":
        """The step as this layer attends."""
        return self if layer.chunk_len is None else self.chunked[layer.chunk_len]

    def mask(self, group_index: int, heads_per_kv: int, window: int | None) -> Tensor:
        """The group's mask, built once per step for all layers alike."""
        key = (group_index, heads_per_kv, window)
        if key not in self._masks:
            self._masks[key] = self.groups[group_index].mask(heads_per_kv, window)
        return self._masks[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """A step in tensors: N new tokens of all sequences, flattened."""

    tokens: Tensor
    """# [1, N]"""
    positions: Tensor
    """# [1, N]"""
    logit_rows: Tensor
    """Which of the tokens need logits.  # [num_rows]"""
    attention: AttentionBatch
    states: StepStates | None = None
    """The recurrent states, if the model has any."""


def step_inputs(
    plan: StepPlan,
    layers: Sequence[LayerCache],
    *,
    vocab_size: int,
    block_size: int,
    device: torch.device,
    states: States | None = None,
) -> StepInputs:
    """The tensors of a plan; ids that a vocabulary of that size lacks become UNKNOWN_TOKEN."""
    chunks = plan.chunks
    tokens = [t if 0 <= t < vocab_size else UNKNOWN_TOKEN for t in plan.tokens]
    positions = [p for c in chunks for p in range(c.cached_len, c.cached_len + c.num_new)]
    attention = _attention_batch(chunks, layers, block_size, device)
    return StepInputs(
        tokens=torch.tensor([tokens], device=device),
        positions=torch.tensor([positions], device=device),
        logit_rows=torch.tensor(plan.logit_rows, dtype=torch.long, device=device),
        attention=attention,
        states=step_states(states, chunks, device) if states else None,
    )


def _attention_batch(
    chunks: Sequence[Chunk], layers: Sequence[LayerCache], block_size: int, device: torch.device
) -> AttentionBatch:
    slot_mapping = [slot for chunk in chunks for slot in _new_slots(chunk, block_size)]
    by_number = {layer.layer: layer for layer in layers}
    slots = torch.tensor(slot_mapping, device=device)

    def batch_of(chunk_len: int | None) -> AttentionBatch:
        attending = [layer for layer in layers if layer.chunk_len == chunk_len]
        pieces = chunks if chunk_len is None else cut(chunks, chunk_len, block_size)
        batch = AttentionBatch(layers=by_number, slot_mapping=slots)
        if any(layer.kernel is not None for layer in attending):
            batch.varlen = _varlen_batch(pieces, device)
        if any(layer.kernel is None for layer in attending):
            all_slots = [_all_slots(piece, block_size) for piece in pieces]
            batch.groups, batch.output_index = _build_groups(pieces, all_slots, device)
        return batch

    lens = {layer.chunk_len for layer in layers if layer.chunk_len is not None}
    batch = batch_of(None)
    batch.chunked = {chunk_len: batch_of(chunk_len) for chunk_len in lens}
    return batch


def cut(chunks: Sequence[Chunk], chunk_len: int, block_size: int) -> list[Chunk]:
    """The new tokens of a step as sequences that begin where attention in chunks does.

    What is left is plain attention. Blocks must not reach over the edge of a chunk.
    """
    assert chunk_len % block_size == 0
    pieces = []
    for chunk in chunks:
        begin, end = chunk.cached_len, chunk.cached_len + chunk.num_new
        while begin < end:
            start = begin - begin % chunk_len
            stop = min(end, start + chunk_len)
            blocks = chunk.block_table[start // block_size : -(-stop // block_size)]
            pieces.append(Chunk(cached_len=begin - start, num_new=stop - begin, block_table=blocks))
            begin = stop
    return pieces


def _new_slots(chunk: Chunk, block_size: int) -> list[int]:
    """The slots of the new tokens: they are few, and a list is made sooner than an array."""
    positions = range(chunk.cached_len, chunk.cached_len + chunk.num_new)
    return [chunk.block_table[p // block_size] * block_size + p % block_size for p in positions]


def _all_slots(chunk: Chunk, block_size: int) -> NDArray[np.int64]:
    """The slots of the whole context, new tokens included.  # [context_len]"""
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
