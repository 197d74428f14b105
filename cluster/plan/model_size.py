"""How large a model is on each rank, learnt from its config.json alone.

The model is built on torch's meta device, which computes shapes and holds no numbers. Its
parameters are cut as transformers' own plan says, and two tokens are run through what is left for
one rank: so whatever serves has a true size, and what cannot serve is refused here as well.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from cluster import bundled
from cluster.placement import check_tensor_parallel
from workers.drafters.model import SMALL_MODEL_BYTES
from workers.errors import UnsupportedModelError, first_line
from workers.loading import build_without_weights
from workers.model import load_config, max_position_of
from workers.model_source import AnyModel, ModelSource
from workers.observation import observe_layers
from workers.precision import chosen_dtype, own_dtype
from workers.quantization import Quantization
from workers.quantizing import check_layers, planned_bytes
from workers.tensor_plans import has_whole_experts
from workers.wrappers import drop_towers

# How the styles of transformers' plans cut a parameter: along its outputs, the last dimension but
# one, or along its inputs, the last.
OUTPUT_STYLES = frozenset({"colwise", "colwise_gather_output", "colwise_rep", "packed_colwise"})
INPUT_STYLES = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise"})
# The same of layers whose weights lie the other way round.
CONV1D_OUTPUT_STYLES = frozenset({"conv1d_by_outputs", "conv1d_by_heads"})
CONV1D_INPUT_STYLES = frozenset({"conv1d_by_inputs"})
EMBEDDING_DIMS = {"embedding_rowwise": 0, "embedding_colwise": 1}
EXPERT_STYLES = frozenset({"grouped_gemm"})
WHOLE_STYLES = frozenset(
    {
        "all_reduce",
        "ep_dispatch_experts",
        "gpt2_heads",
        "local_params",
        "mla_kv_a_proj",
        "moe_identity_expert",
        "moe_tp_experts",
        "replicate",
        "replicated_with_grad_allreduce",
        "sequence_parallel",
    }
)
KNOWN_STYLES = (
    OUTPUT_STYLES
    | INPUT_STYLES
    | CONV1D_OUTPUT_STYLES
    | CONV1D_INPUT_STYLES
    | {*EMBEDDING_DIMS}
    | EXPERT_STYLES
    | WHOLE_STYLES
)
# Modules of these styles reshape what they make by numbers that a rank has its own of.
NARROWED_STYLES = CONV1D_OUTPUT_STYLES | {"gpt2_heads"}
# Modules of these styles put their ranks' outputs together, or take each rank's part of the input.
GATHERING_STYLES = frozenset({"colwise_gather_output", "colwise_rep", "embedding_colwise"})
SPLITTING_STYLES = frozenset({"rowwise_split_input", "rowwise_rep"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The share of a model that its first rank holds, which is the largest where shares differ."""

    name: str
    dtype: str
    tp_size: int
    weight_bytes: int
    quantization: Quantization
    slot_bytes: int
    """Cache bytes per token."""
    state_bytes: int = 0
    """Bytes of the recurrent states in one slot, of which a sequence has two."""
    max_position: int
    """The longest sequence the positions of the model allow."""
    remarks: tuple[str, ...] = ()
    """Sentences about what config.json leaves open."""

    @property
    def precision(self) -> str:
        """The model's dtype, and how its weights are quantized, if they are."""
        return self.dtype if self.quantization == "none" else f"{self.dtype} ({self.quantization})"


def size_model(
    model: AnyModel,
    *,
    dtype: str = "auto",
    tp_size: int = 1,
    on_gpu: bool = False,
    quantization: Quantization = "none",
) -> ModelSize:
    """The share that each of `tp_size` ranks has of a model; loads its config.json, no weights.

    Args:
        model: a bundled model, a folder or a Hugging Face id.
        dtype: as of `load_model`.
        on_gpu: where it is to run.
        quantization: as of `load_model`.

    Raises: ModelNotFoundError, UnsupportedModelError, ConfigError.
    """
    source = ModelSource.of(model)
    name = source.name
    config = load_config(bundled.resolve(source))
    check_tensor_parallel(name, config, tp_size)
    torch_dtype, remarks = _choose_dtype(name, config, dtype, on_gpu=on_gpu)
    module = build_without_weights(source, config, torch_dtype)
    drop_towers(module, lambda: observe_layers(name, module))
    check_layers(name, module, quantization)
    if tp_size > 1:
        _cut_to_rank(name, module, tp_size)
    try:
        layers = observe_layers(name, module)
    except (RuntimeError, TypeError) as error:
        raise UnsupportedModelError(
            f"model {name!r} cannot be run with tensor_parallel_size={tp_size}: {first_line(error)}"
        ) from error
    return ModelSize(
        name=name,
        dtype=str(torch_dtype).removeprefix("torch."),
        tp_size=tp_size,
        weight_bytes=planned_bytes(module, quantization),
        quantization=quantization,
        slot_bytes=sum(spec.slot_bytes(torch_dtype) for spec in layers.attention),
        state_bytes=sum(spec.num_bytes for spec in layers.states),
        max_position=max_position_of(name, config),
        remarks=remarks,
    )


def size_draft(
    model: AnyModel, *, dtype: str, on_gpu: bool, quantization: Quantization = "none"
) -> ModelSize:
    """The size of a draft model as it is loaded at most: a small bf16 one is fp32 on some CPUs."""
    size = size_model(model, dtype=dtype, on_gpu=on_gpu, quantization=quantization)
    is_small = size.weight_bytes < SMALL_MODEL_BYTES
    if dtype == "auto" and is_small and size.dtype == "bfloat16" and not on_gpu:
        return size_model(model, dtype="float32", quantization=quantization)
    return size


def _choose_dtype(
    name: str, config: PreTrainedConfig, dtype: str, *, on_gpu: bool
) -> tuple[torch.dtype, tuple[str, ...]]:
    """The dtype, and what has to be said about it."""
    own = own_dtype(config)
    chosen = chosen_dtype(dtype, config, on_cpu=not on_gpu) or own or torch.float32
    remarks = []
    if dtype == "auto" and own is None:
        remarks.append(
            f"the config.json of {name!r} names no dtype, so float32 is assumed; if the checkpoint "
            "has another, set dtype"
        )
    elif dtype == "auto" and own != chosen:
        remarks.append(
            f"{name!r} is a float16 checkpoint, which a CPU runs in float32: texts are exact so, "
            "and weights take twice the memory; dtype=bfloat16 or float16 halves it"
        )
    if getattr(config, "quantization_config", None) is not None:
        remarks.append(
            f"{name!r} is quantized, and its weights are counted in {chosen}: they take less where "
            "they stay quantized"
        )
    return chosen, tuple(remarks)


def _cut_to_rank(name: str, module: PreTrainedModel, tp_size: int) -> None:
    """Leave the first rank's share of each parameter, as `DistributedConfig(tp_plan="auto")` does.

    Where ranks would exchange what changes a shape, hooks make that shape.
    """
    plan: dict[str, str] = dict(module.tp_plan)
    if has_whole_experts(module.config):
        plan |= module.ep_plan
    if unknown := set(plan.values()) - KNOWN_STYLES:
        raise UnsupportedModelError(
            f"the tensor-parallel plan of {name!r} shares parameters in a way that cannot be "
            f"foreseen: {', '.join(sorted(unknown))}"
        )
    cut: dict[int, nn.Parameter] = {}
    """Cut parameters by the identity of the whole one, so that tied parameters stay tied."""
    for module_name, owner in list(module.named_modules()):
        for parameter_name, whole in list(owner.named_parameters(recurse=False)):
            if id(whole) not in cut:
                style = _style(plan, f"{module_name}.{parameter_name}", module_name)
                cut[id(whole)] = _cut_parameter(whole, parameter_name, style, tp_size)
            setattr(owner, parameter_name, cut[id(whole)])
        module_style = _style(plan, module_name)
        if module_style in NARROWED_STYLES:
            from workers.conv1d_sharing import narrow  # older transformers lack what it is made of

            narrow(owner, tp_size)
        _add_hooks(owner, module_style)


def _style(plan: dict[str, str], *names: str) -> str | None:
    """The plan's style for the first name that it has; plans write * for numbers."""
    patterns = (re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names)
    return next((plan[pattern] for pattern in patterns if pattern in plan), None)


def _cut_parameter(whole: nn.Parameter, name: str, style: str | None, tp_size: int) -> nn.Parameter:
    if name == "bias" and style in INPUT_STYLES | CONV1D_INPUT_STYLES:
        return whole  # it is added once, to the ranks' sum
    if style in OUTPUT_STYLES:
        dim = max(whole.ndim - 2, 0)
    elif style in INPUT_STYLES | CONV1D_OUTPUT_STYLES:
        dim = whole.ndim - 1
    elif style in EXPERT_STYLES | CONV1D_INPUT_STYLES:
        dim = 0
    elif style in EMBEDDING_DIMS:
        dim = EMBEDDING_DIMS[style]
    else:
        return whole
    shape = list(whole.shape)
    shape[dim] = -(-shape[dim] // tp_size)
    return nn.Parameter(whole.new_empty(shape), requires_grad=False)


def _add_hooks(owner: nn.Module, style: str | None) -> None:
    def gather(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        width = owner.embedding_dim if style in EMBEDDING_DIMS else owner.out_features
        assert isinstance(width, int)
        return output.new_empty((*output.shape[:-1], width))

    def split(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        weight = owner.weight
        assert isinstance(weight, Tensor)
        return (inputs[0][..., : weight.shape[-1]], *inputs[1:])

    if style in GATHERING_STYLES:
        owner.register_forward_hook(gather)
    if style in SPLITTING_STYLES:
        owner.register_forward_pre_hook(split)
