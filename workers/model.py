"""Loading a Hugging Face decoder and running its own forward over our paged cache."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from workers.checkpoint import check_checkpoint, read_config
from workers.cpu.kernel import CpuKernel
from workers.cpu.packed_linear import pack_linears
from workers.cuda.triton_kernel import TritonKernel
from workers.cuda.varlen_kernel import VarlenKernel
from workers.end_tokens import find_end_tokens
from workers.errors import ConfigError, UnsupportedModelError, first_line
from workers.loading import load_weights
from workers.model_cache import past_lengths
from workers.model_source import AnyModel, ModelSource
from workers.observation import observe_layers
from workers.paged_kernel import LayerSpec, PagedKernel
from workers.precision import DTYPES, chosen_dtype, is_widened, text_warnings
from workers.quantization import Quantization
from workers.quantizing import weight_bytes
from workers.recurrent import States, StateSpec, cut_batches, make_states
from workers.step_inputs import LayerCache, StepInputs
from workers.tensor_plans import add_plan
from workers.wrappers import drop_towers

logger = logging.getLogger(__name__)

# Rotary embeddings whose angles depend on the longest sequence of the batch beyond this length.
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A loaded model and the shapes of what its layers keep."""

    source: ModelSource
    module: PreTrainedModel
    layer_specs: tuple[LayerSpec, ...]
    """The shapes of its attention layers."""
    vocab_size: int
    max_position: int
    """The longest sequence the positions of the model allow."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a text; see `end_tokens`."""
    device: torch.device
    dtype: torch.dtype
    num_weight_bytes: int
    """Bytes of the weights of this rank, about."""
    state_specs: tuple[StateSpec, ...] = ()
    """What its recurrent layers keep of a sequence, if it has any."""
    text_warnings: tuple[str, ...] = ()
    """Why its texts may depend on more than its weights; see `precision`."""
    quantization: Quantization = "none"
    """How its weights were quantized as they were loaded."""
    num_first_layers: int | None = None
    """How many of the layers these are, the first ones, if not all; see `first_layers`."""

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def slot_bytes(self) -> int:
        """Cache bytes per token."""
        return sum(spec.slot_bytes(self.dtype) for spec in self.layer_specs)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states in one slot; 0 without recurrent layers."""
        return sum(spec.num_bytes for spec in self.state_specs)

    @property
    def irregularity(self) -> str | None:
        """Why what a step launches depends on the step, if it does: no recording can hold it."""
        if self.state_specs:
            return "how its recurrent layers are run depends on the step"
        if any(spec.chunk_len is not None for spec in self.layer_specs):
            return "into how many chunks its attention is cut depends on the step"
        return None

    def for_texts_of(self, max_len: int) -> "Model":
        """The model for texts of so many tokens at most: chunks as long as these are none."""
        specs = (
            replace(spec, chunk_len=None) if (spec.chunk_len or 0) >= max_len else spec
            for spec in self.layer_specs
        )
        return replace(self, layer_specs=tuple(specs))

    def make_states(self, num_slots: int) -> States:
        """The recurrent states of all slots, as texts begin with them."""
        return make_states(self.state_specs, num_slots, self.device)

    def make_cache(self, num_blocks: int, block_size: int) -> tuple[LayerCache, ...]:
        """Uninitialised cache tensors of all layers; memory is touched only as it is used."""
        num_slots = num_blocks * block_size

        def empty(spec: LayerSpec, dim: int) -> Tensor:
            shape = (num_slots, spec.num_kv_heads, dim)
            return torch.empty(shape, dtype=self.dtype, device=self.device)

        kernels = {
            spec: self._find_kernel(spec, block_size) for spec in dict.fromkeys(self.layer_specs)
        }
        return tuple(
            LayerCache(
                layer=spec.layer,
                keys=empty(spec, spec.key_dim),
                values=empty(spec, spec.value_dim),
                kernel=kernels[spec],
                chunk_len=spec.chunk_len,
            )
            for spec in self.layer_specs
        )

    def _find_kernel(self, spec: LayerSpec, block_size: int) -> PagedKernel | None:
        if self.device.type == "cpu":
            return CpuKernel.find(spec, block_size=block_size, dtype=self.dtype)
        varlen = VarlenKernel.find(
            spec, block_size=block_size, dtype=self.dtype, device=self.device
        )
        return varlen or TritonKernel.find(
            spec, block_size=block_size, dtype=self.dtype, device=self.device
        )

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> Tensor:
        """Run the new tokens, filling the cache.

        Returns: logits in the model's dtype.  # [len(logit_rows), vocab]
        """
        output = self.module(
            input_ids=inputs.tokens,
            position_ids=inputs.positions,
            use_cache=False,
            logits_to_keep=inputs.logit_rows,
            attention_batch=inputs.attention,
            **({"past_key_values": inputs.states} if inputs.states is not None else {}),
            **past_lengths(self.module.config, inputs.positions),
        )
        logits: Tensor = output.logits[0]
        return logits


def load_model(
    name: AnyModel,
    *,
    dtype: str = "auto",
    device: str = "auto",
    tp_size: int = 1,
    quantization: Quantization = "none",
) -> Model:
    """Load a causal language model from a folder or a Hugging Face id.

    Args:
        dtype: "auto" (the checkpoint's own, but float32 for a float16 one on a CPU), "float32",
            "bfloat16" or "float16".
        device: "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:<index>".
        tp_size: ranks that share the weights, of which this process is one: each reads its shard
            only. All load at a time, after they have met in a torch.distributed process group.
        quantization: of the weights, by this process; not of a group.

    Raises: ModelNotFoundError, DamagedModelError, UnsupportedModelError, ConfigError.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; it must be 'auto', {_one_of(DTYPES)}")
    resolved_device = resolve_device(device)
    check_checkpoint(name)
    config = load_config(name)
    on_cpu = resolved_device.type == "cpu"
    weights_dtype = chosen_dtype(dtype, config, on_cpu=on_cpu)
    module = load_weights(
        name, config, weights_dtype or "auto", resolved_device, tp_size, quantization
    )
    if weights_dtype is None and is_widened(module.dtype, on_cpu=on_cpu):
        if quantization != "none":
            return load_model(name, dtype="float32", device=device, quantization=quantization)
        module = module.float()  # config.json names no dtype
    try:
        return make_model(name, module, tp_size=tp_size, quantization=quantization)
    except UnsupportedModelError as error:
        if quantization == "none":
            raise
        raise UnsupportedModelError(
            f"{error}; its weights were quantized (quantization {quantization}): use another one, "
            "or none"
        ) from error


def make_model(
    name: AnyModel,
    module: PreTrainedModel,
    *,
    tp_size: int = 1,
    quantization: Quantization = "none",
) -> Model:
    """What serves a module that has its weights and goes through the paged attention.

    Args:
        name: a folder or id that has the module's configuration, and what ends its texts.
        tp_size: ranks that share the weights, of which this process is one.
        quantization: how the module's weights were quantized.

    Raises UnsupportedModelError.
    """
    module.train(mode=False)
    config = module.config
    drop_towers(module, lambda: observe_layers(name, module))
    num_weight_bytes = weight_bytes(module) // tp_size
    layers = observe_layers(name, module)
    cut_batches(module, token_by_token=layers.go_on_by_token)
    # of layers that other ranks share, transformers wraps the calls
    if tp_size == 1 and pack_linears(module):
        observe_layers(name, module)  # whether its code is content with layers that are packed
    vocab_size = int(config.get_text_config().vocab_size)
    return Model(
        source=ModelSource.of(name),
        module=module,
        layer_specs=layers.attention,
        state_specs=layers.states,
        vocab_size=vocab_size,
        eos_token_ids=find_end_tokens(name, vocab_size),
        max_position=max_position_of(name, config),
        device=module.device,
        dtype=module.dtype,
        num_weight_bytes=num_weight_bytes,
        text_warnings=text_warnings(ModelSource.of(name).name, module),
        quantization=quantization,
    )


def resolve_device(device: str) -> torch.device:
    """The torch device that an option names; raises ConfigError if it is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device is {device!r}; it must be 'auto', 'cpu' or 'cuda'") from None
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {device!r}, but torch sees no CUDA device; use device=cpu")
    return resolved


def load_config(name: AnyModel) -> PreTrainedConfig:
    """The configuration of a model.

    Raises: ModelNotFoundError, DamagedModelError, UnsupportedModelError.
    """
    content, source = read_config(name), ModelSource.of(name)
    # of a type that transformers knows, its own class reads it, whatever the model brings
    has_class = content["model_type"] in CONFIG_MAPPING
    options = source.hub_options | ({"trust_remote_code": False} if has_class else {})
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(source.name, **options)
    except Exception as error:  # each class checks its fields in its own way
        raise UnsupportedModelError(
            f"model {name!r} has no usable config.json: {type(error).__name__}: {first_line(error)}"
        ) from error
    add_plan(config)
    return config


def max_position_of(name: AnyModel, config: PreTrainedConfig) -> int:
    text_config = config.get_text_config()
    max_position = getattr(text_config, "max_position_embeddings", None)
    if text_config.model_type == "mpt":  # the one that serves and has another name for it
        max_position = text_config.max_seq_len
    if max_position is None:
        raise UnsupportedModelError(
            f"model {name!r} ({text_config.model_type}) does not say how long its context is "
            "(max_position_embeddings)"
        )
    rope: Any = getattr(text_config, "rope_parameters", None) or {}
    if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
        # Beyond this length the angles of all sequences in a batch would follow the longest one.
        original = rope.get("original_max_position_embeddings") or max_position
        return min(int(original), int(max_position))
    return int(max_position)


def _one_of(names: Sequence[str] | dict[str, Any]) -> str:
    return " or ".join(repr(name) for name in names)
