"""What a model's attention layers are, and whether they can be paged: seen in its own forward.

Reading head counts and windows from the configuration means guessing the names that each
architecture gives them, and how it uses them. So a model runs two tokens, once, when it is loaded,
and what reaches the attention function is noted: shapes, how often each layer calls it, and whether
the window it names is that of the mask which the model has asked transformers for. While a model is
served, no mask is made: causality, windows and chunks are all that the paged attention knows.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from workers import attention
from workers.attention import AttentionObserver
from workers.errors import UnsupportedModelError, first_line
from workers.model_cache import past_lengths
from workers.model_source import AnyModel
from workers.paged_kernel import LayerSpec, ScoreRule
from workers.recurrent import StateObserver, StateSpec, find_layers

PAGED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
# Some have attention too.
RECURRENT_LAYER_TYPES = frozenset({"linear_attention", "conv", "hybrid"})
STATELESS_LAYER_TYPES = frozenset({"mlp", "moe"})
SERVED_LAYER_TYPES = PAGED_LAYER_TYPES | RECURRENT_LAYER_TYPES | STATELESS_LAYER_TYPES
NOT_ATTENDING = SERVED_LAYER_TYPES - PAGED_LAYER_TYPES - {"hybrid"}
NUM_TOKENS = 2
# Masks are looked at no farther than this; windows beyond matter to no one.
MAX_MASK_LEN = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mask:
    """A mask that the model has asked for."""

    window: int | None
    """How many tokens each one sees, itself included; None for all before it."""
    is_plain: bool
    """Whether it is a causal mask, with or without a window."""
    chunk_len: int | None = None
    """Whether it is a causal mask within chunks of so many tokens."""


class LayerObserver(AttentionObserver):
    """Stands in for an AttentionBatch while a model is observed."""

    def __init__(self, context_len: int, chunk_len: int | None) -> None:
        """Make an observer.

        Args:
            context_len: how far the windows of masks are looked for.
            chunk_len: what the chunks of masks are, if they have any.
        """
        self.specs: dict[int, LayerSpec] = {}
        self.num_calls: Counter[int] = Counter()
        self.problems: list[str] = []
        self._context_len = context_len
        self._chunk_len = chunk_len if chunk_len and chunk_len < context_len else None
        self._masks: list[tuple[Tensor, _Mask]] = []

    def observe(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        rule: ScoreRule,
    ) -> Tensor:
        """Note the layer and attend causally.  # [1, H, N, D] -> [1, N, H, D]"""
        index = getattr(module, "layer_idx", None)
        if not getattr(module, "is_causal", True) or not isinstance(index, int):
            self.problems.append(_why_no_layer(module))
            return value.transpose(1, 2)
        self.num_calls[index] += 1
        self.specs[index] = LayerSpec(
            layer=index,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            is_plain=rule.softcap is None and rule.sinks is None,
        )
        if mask is not None:
            self._compare(index, mask, rule.window)
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return output.transpose(1, 2)

    def make_mask(self, *, mask_function: Callable[..., Any], **arguments: Any) -> Tensor:
        """Make the mask that transformers would, and note what it is.  # [1, 1, N, N]"""
        never_left_out = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        arguments |= {"mask_function": mask_function, **never_left_out}
        mask = sdpa_mask(**arguments)
        assert mask is not None
        self._masks.append((mask, self._read(arguments)))
        return mask

    def _read(self, arguments: dict[str, Any]) -> _Mask:
        """Look at a few rows of the mask: far from its start, and where a chunk would begin."""
        rows = [self._context_len // 2, self._context_len - 1]
        if self._chunk_len is not None:
            rows += [self._chunk_len - 1, self._chunk_len]
        num_seen = {}
        for row in rows:
            far = {"q_length": 1, "kv_length": row + 2, "q_offset": row, "attention_mask": None}
            mask = sdpa_mask(**{**arguments, **far})
            assert mask is not None
            seen = mask[0, 0, 0]
            num_seen[row] = int(seen.sum())
            if not seen[row + 1 - num_seen[row] : row + 1].all():
                return _Mask(window=None, is_plain=False)
        most = num_seen[self._context_len - 1]
        if all(number == min(most, row + 1) for row, number in num_seen.items()):
            return _Mask(window=most if most < self._context_len else None, is_plain=True)
        if self._chunk_len is not None and all(
            number == row % self._chunk_len + 1 for row, number in num_seen.items()
        ):
            return _Mask(window=None, is_plain=False, chunk_len=self._chunk_len)
        return _Mask(window=None, is_plain=False)

    def _compare(self, index: int, mask: Tensor, window: int | None) -> None:
        made = [info for tensor, info in self._masks if _share_storage(tensor, mask)]
        if not made:
            self.problems.append(
                f"makes an attention mask of its own (layer {index}), which paged attention would "
                "not see"
            )
        elif made[0].chunk_len is not None and window is None:
            self.specs[index] = replace(self.specs[index], chunk_len=made[0].chunk_len)
        elif not made[0].is_plain:
            self.problems.append(
                "masks its attention otherwise than by causality and a sliding window or chunks "
                f"(layer {index})"
            )
        elif self._shorter(made[0].window) != self._shorter(window):
            self.problems.append(
                f"masks layer {index} by {_name_window(made[0].window)}, but names "
                f"{_name_window(window)} to the attention interface, which would attend otherwise"
            )

    def _shorter(self, window: int | None) -> int | None:
        """The window, if a text can be longer."""
        return None if window is None or window >= self._context_len else window


def _why_no_layer(module: nn.Module) -> str:
    if not getattr(module, "is_causal", True):
        return "attends in both directions, as encoders do, so it cannot generate text"
    return f"has attention that belongs to no numbered layer ({type(module).__name__})"


def _name_window(window: int | None) -> str:
    return "no window" if window is None else f"a window of {window} tokens"


def _share_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedLayers:
    """What the layers of a model keep of a text."""

    attention: tuple[LayerSpec, ...]
    states: tuple[StateSpec, ...]
    go_on_by_token: bool
    """Whether recurrent layers that are given several tokens forget the state before them."""


def observe_layers(name: AnyModel, module: PreTrainedModel) -> ObservedLayers:
    """Learn what each layer keeps of a text by running two tokens through the model.

    A model without weights, on the meta device, shows its shapes; its masks cannot be read.

    Raises: UnsupportedModelError if some layer does not pass through the attention function once,
    keeps what can be neither paged nor copied, or attends in a way that paged attention cannot.
    """
    config = module.config.get_text_config()
    kind = f"model {name!r} ({config.model_type})"
    _check_config(kind, config)
    context_len = int(getattr(config, "max_position_embeddings", None) or MAX_MASK_LEN)
    observer = LayerObserver(
        min(context_len, MAX_MASK_LEN), getattr(config, "attention_chunk_size", None)
    )
    failure: Exception | None = None
    num_logits = 0
    states = StateObserver()
    try:
        num_logits = _run(module, observer, states)
    except UnsupportedModelError as error:  # of the attention function
        raise UnsupportedModelError(f"{kind} cannot be served: {error}") from None
    except Exception as error:  # whatever a model's own code may raise
        failure = error
        observer.problems.append(
            f"fails over a paged cache ({type(error).__name__}: {first_line(error)})"
        )
    problems = observer.problems or _count_problems(observer, config)
    problems = problems or _state_problems(module, states, config)
    if not problems and num_logits != 1:
        problems = ["gives logits of all tokens where those of one are wanted (logits_to_keep)"]
    if problems:
        raise UnsupportedModelError(f"{kind} cannot be served: it {problems[0]}") from failure
    specs = tuple(spec for _, spec in sorted(observer.specs.items()))
    return ObservedLayers(
        attention=specs, states=states.specs, go_on_by_token=_go_on_by_token(module, states)
    )


def _count_problems(observer: LayerObserver, config: Any) -> list[str]:
    num_layers = config.num_hidden_layers
    attending = {n for n, kind in enumerate(_layer_types(config)) if kind not in NOT_ATTENDING}
    if attending != set(observer.specs) or not attending:
        return [
            f"takes {len(observer.specs)} of its {num_layers} layers through transformers' "
            f"attention interface, and {len(attending) or 'some'} of them must"
        ]
    most_calls = max(observer.num_calls.values())
    if most_calls > 1:
        return [f"attends {most_calls} times in one layer, and a layer has one cache"]
    return []


def _state_problems(module: PreTrainedModel, states: StateObserver, config: Any) -> list[str]:
    """What is wrong with recurrent layers: all of them must keep their states in the cache."""
    seen = {spec.key.layer for spec in states.specs}
    unknown = seen - {layer.layer_idx for layer in find_layers(module)}
    if odd_layers := sorted(_recurrent_layers(config) ^ seen | unknown):
        return [f"keeps a state in layer {odd_layers[0]} in a way that is not known here"]
    return []


def _go_on_by_token(module: PreTrainedModel, states: StateObserver) -> bool:
    """Whether the first recurrent state comes out the same, whatever it was before the tokens.

    Some scans begin with zeros: `generate` runs several tokens at the beginning of a text only.
    """
    keys = [key for key in states.values if key.kind == "recurrent"]
    if not keys or module.device.type == "meta":
        return False
    ends = []
    for number in (0.0, 1.0):
        going_on = states.with_recurrent(number)
        _run(module, LayerObserver(NUM_TOKENS, None), going_on)
        ends.append(going_on.values[min(keys)])
    return torch.equal(*ends)


def _recurrent_layers(config: Any) -> set[int]:
    return {n for n, kind in enumerate(_layer_types(config)) if kind in RECURRENT_LAYER_TYPES}


def _layer_types(config: Any) -> list[str]:
    """What the config says of each layer; "" where it says nothing."""
    return getattr(config, "layer_types", None) or [""] * config.num_hidden_layers


def _check_config(kind: str, config: Any) -> None:
    """Raise UnsupportedModelError for what two tokens do not show."""
    if config.num_hidden_layers < 1:
        raise UnsupportedModelError(
            f"{kind} cannot be served: num_hidden_layers is {config.num_hidden_layers} in its "
            "config.json; it must be at least 1"
        )
    odd_layers = set(getattr(config, "layer_types", None) or ()) - SERVED_LAYER_TYPES
    if odd_layers:
        raise UnsupportedModelError(
            f"{kind} has layers of type {' or '.join(map(repr, sorted(odd_layers)))}, whose state "
            "cannot be paged and rolled back; attention can be served in full, within a sliding "
            "window and in chunks, and linear attention, state spaces and convolutions that "
            "transformers keeps a state of"
        )


def _run(module: PreTrainedModel, observer: LayerObserver, states: StateObserver) -> int:
    """Run two tokens, asking for the logits of one; returns of how many it gives them."""
    tokens = torch.zeros(1, NUM_TOKENS, dtype=torch.long, device=module.device)
    # of a meta tensor, transformers cannot ask whether its positions are those of packed sequences
    has_numbers = module.device.type != "meta"
    has_states = bool(_recurrent_layers(module.config.get_text_config()))
    positions = torch.arange(NUM_TOKENS, device=module.device)[None]
    with torch.inference_mode(), _masks_made_by(observer, module, is_wanted=has_numbers):
        output = module(
            input_ids=tokens,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=torch.tensor([NUM_TOKENS - 1], device=module.device),
            attention_batch=observer,
            # only where it is needed: it lets transformers make other masks
            **({"past_key_values": states} if has_states else {}),
            **past_lengths(module.config, positions),
        )
    return int(output.logits.shape[1])


@contextmanager
def _masks_made_by(
    observer: LayerObserver, module: PreTrainedModel, *, is_wanted: bool
) -> Iterator[None]:
    """Let transformers ask the observer for masks, which it makes none of for paged attention."""
    if not is_wanted:
        yield
        return
    name = f"{attention.ATTENTION_NAME}_observed_{id(observer):x}"
    AttentionInterface.register(name, attention.paged_attention)
    AttentionMaskInterface.register(name, observer.make_mask)
    module.config._attn_implementation = name
    try:
        yield
    finally:
        module.config._attn_implementation = attention.ATTENTION_NAME
        AttentionInterface._global_mapping.pop(name)
        AttentionMaskInterface._global_mapping.pop(name)
