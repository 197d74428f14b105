"""Layers with a recurrent state (linear attention, state spaces, short convolutions) in a batch.

Such a layer keeps a state of fixed size of each sequence instead of keys and values. Transformers'
own code runs it, for rectangles of sequences, and takes the states from the cache that it is given.
So a layer's forward is replaced by one that cuts the flattened batch into rectangles, of the
sequences with equally many new tokens, and hands each to the layer with the states of its
sequences. Tokens that are known to stay and drafts after them are cut apart: the state in between
is what a sequence goes back to when drafts are rejected; see `state_slots`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workers.model_cache import NoCache
from workers.state_slots import StateMoves
from workers.step_plan import Chunk

CACHE_ARGUMENTS = ("cache_params", "past_key_values")
"""What transformers' layers call the cache that they are given."""


class StateKey(NamedTuple):
    """The name of one state of a model: its layer, its kind and its number."""

    layer: int
    kind: str
    """"conv" (the inputs of a convolution that it will see again) or "recurrent"."""
    number: int
    """The state's number among those of its kind, of which a layer may have several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """A state as it was seen in the model's own forward."""

    key: StateKey
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one slot."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


States = Mapping[StateKey, Tensor]
"""The states of all slots.  # each [num_slots, *shape]"""


def make_states(specs: Sequence[StateSpec], num_slots: int, device: torch.device) -> States:
    """All states, of sequences that have not begun."""
    return {
        spec.key: torch.zeros((num_slots, *spec.shape), dtype=spec.dtype, device=device)
        for spec in specs
    }


class LayerStates:
    """What transformers' layers take for their cache; keys and values are paged elsewhere.

    A layer may change what it is given in place. So it is given copies.
    """

    def __init__(self, values: dict[StateKey, Tensor]) -> None:
        """`values` are the states of the sequences of a rectangle.  # each [B, *shape]"""
        self.values = values

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.values.get(StateKey(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.values.get(StateKey(layer_idx, "recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Add inputs of a convolution; returns those before them and them.  # [B, D, any + L]"""
        key = StateKey(layer_idx, "conv", state_idx)
        state_len = conv_kernel_size or self.values[key].shape[-1]
        before = self.values.get(key)
        if before is None:  # the layer is observed
            before = conv_states.new_zeros((*conv_states.shape[:-1], state_len))
        inputs = torch.cat([before, conv_states], dim=-1)
        self.values[key] = inputs[..., -state_len:]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self.values[StateKey(layer_idx, "recurrent", state_idx)] = recurrent_states
        return recurrent_states

    def is_recording_past(self, _: int) -> bool:
        return False


class StateObserver(LayerStates, NoCache):
    """Stands in for the states of sequences while a model is observed, which runs one sequence."""

    def __init__(self, values: dict[StateKey, Tensor] | None = None) -> None:
        """`values` are the states to begin with, if the text has begun."""
        super().__init__(values or {})

    def with_recurrent(self, number: float) -> "StateObserver":
        """An observer that begins with these convolutions, and this number in all other states."""
        return StateObserver(
            {
                key: torch.full_like(value, number) if key.kind == "recurrent" else value.clone()
                for key, value in self.values.items()
            }
        )

    @property
    def specs(self) -> tuple[StateSpec, ...]:
        return tuple(
            StateSpec(key=key, shape=tuple(value.shape[1:]), dtype=value.dtype)
            for key, value in sorted(self.values.items())
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rectangle:
    """Parts of B sequences, of L tokens each, which a layer runs in one call."""

    rows: Tensor
    """Where the tokens stand in the flattened batch.  # [B, L]"""
    read: Tensor
    """The slots of the states before them.  # [B]"""
    write: Tensor
    """The slots of the states after them.  # [B]"""


@dataclass(frozen=True, kw_only=True)
class StepStates(NoCache):
    """The states of all sequences as a step needs them: given to the model as its cache."""

    states: States
    rectangles: Sequence[_Rectangle]

    def run(self, layer: int, hidden: Tensor, run: Callable[..., Tensor]) -> Tensor:
        """Run a layer on the new tokens, rectangle by rectangle.  # [1, N, H] -> [1, N, H]"""
        output = torch.empty_like(hidden)
        keys = [key for key in self.states if key.layer == layer]
        for part in self.rectangles:
            cache = LayerStates({key: self.states[key][part.read] for key in keys})
            output[0, part.rows] = run(hidden[0, part.rows], cache)
            for key in keys:
                self.states[key][part.write] = cache.values[key].to(self.states[key].dtype)
        return output


def step_states(states: States, chunks: Sequence[Chunk], device: torch.device) -> StepStates:
    """What a step of these chunks does to states; those of chunks without any are forgotten."""
    spare = len(next(iter(states.values()))) - 1
    parts: dict[tuple[bool, int], list[tuple[int, int, int]]] = {}
    first = 0
    for chunk in chunks:
        moves = chunk.states or StateMoves.to_spare(spare)
        num_committed = chunk.num_new - moves.num_drafts
        read = moves.read
        if num_committed:
            parts.setdefault((False, num_committed), []).append(
                (first, read, moves.slots.committed)
            )
            read = moves.slots.committed
        if moves.num_drafts:
            start = first + num_committed
            parts.setdefault((True, moves.num_drafts), []).append((start, read, moves.slots.drafts))
        first += chunk.num_new
    # what is committed first: the drafts of a sequence continue from it
    return StepStates(
        states=states,
        rectangles=[
            _rectangle(parts[is_drafts, length], length, device)
            for is_drafts, length in sorted(parts)
        ],
    )


def _rectangle(
    parts: Sequence[tuple[int, int, int]], length: int, device: torch.device
) -> _Rectangle:
    """A rectangle of parts that are (first row, slot read, slot written)."""
    starts, read, write = torch.tensor(parts, device=device).unbind(1)
    rows = starts[:, None] + torch.arange(length, device=device)
    return _Rectangle(rows=rows, read=read, write=write)


def find_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers that keep a state: they convolve over tokens, all that there are."""
    for layer in module.modules():
        convolves = any(isinstance(child, nn.Conv1d) for child in layer.children())
        if convolves and isinstance(getattr(layer, "layer_idx", None), int):
            yield layer


def cut_batches(module: nn.Module, *, token_by_token: bool) -> None:
    """Have the recurrent layers of a model run flattened batches, where they get StepStates.

    Args:
        token_by_token: for layers that go on from a state with one token at a time only.
    """
    for layer in find_layers(module):
        layer.forward = _forward_in_rectangles(layer, layer.forward, token_by_token)


def _forward_in_rectangles(
    layer: nn.Module, forward: Callable[..., Tensor], token_by_token: bool
) -> Callable[..., Tensor]:
    index = layer.layer_idx
    assert isinstance(index, int)

    def run(hidden_states: Tensor, **arguments: Any) -> Tensor:
        name = next((name for name in CACHE_ARGUMENTS if name in arguments), "")
        cache = arguments.get(name)
        if not isinstance(cache, StepStates):
            return forward(hidden_states, **arguments)
        arguments = {k: v for k, v in arguments.items() if k not in (name, "attention_batch")}

        def run_part(part: Tensor, own: LayerStates) -> Tensor:
            columns = part.split(1, dim=1) if token_by_token else [part]
            return torch.cat([forward(x, **{name: own}, **arguments) for x in columns], dim=1)

        return cache.run(index, hidden_states, run_part)

    return run
