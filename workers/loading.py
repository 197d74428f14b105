"""Weights into a model of transformers, or one sentence that says why not."""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from huggingface_hub.errors import GatedRepoError
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from workers import attention, quantization, quantizing
from workers.checkpoint import explain_gate
from workers.errors import (
    ConfigError,
    DamagedModelError,
    ModelNotFoundError,
    UnsupportedModelError,
    first_line,
)
from workers.model_source import AnyModel, ModelSource
from workers.mpt import PagedMpt
from workers.precision import own_dtype
from workers.quantization import Quantization
from workers.tensor_plans import has_whole_experts

REWRITTEN: dict[str, type[PreTrainedModel]] = {"mpt": PagedMpt}
"""Models whose own code calls no attention function, by type: our forward over the same weights."""


def load_weights(
    name: AnyModel,
    config: PreTrainedConfig,
    dtype: torch.dtype | str,
    device: torch.device,
    tp_size: int,
    quantization: Quantization = "none",
) -> PreTrainedModel:
    """The model with its weights, whose attention is the paged one.

    Args:
        dtype: "auto" for the checkpoint's own.
        tp_size: ranks that share the weights, of which this process is one.

    Raises: ModelNotFoundError, DamagedModelError, UnsupportedModelError, ConfigError.
    """
    source = ModelSource.of(name)
    check_class(source, config)
    _check_dtype(source, config, dtype)
    quantizing.check_quantization(source, config.to_dict(), quantization, device)
    compute_dtype = _compute_dtype(config, dtype)
    if quantization != "none":
        planned = build_without_weights(source, config, compute_dtype)
        quantizing.check_layers(source, planned, quantization)
    where: dict[str, Any] = {"device_map": {"": device}}
    if tp_size > 1:
        ep_size = tp_size if has_whole_experts(config) else 1
        distributed = DistributedConfig(tp_size=tp_size, tp_plan="auto", ep_size=ep_size)
        where = {"distributed_config": distributed}
    attention.register()
    try:
        # typed as the model alone, but a pair when the loading info is asked for
        loaded: Any = _class_of(source, config).from_pretrained(
            source.name,
            config=config,
            dtype=dtype,
            **where,
            **quantizing.loading_options(quantization, compute_dtype),
            attn_implementation=attention.ATTENTION_NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
            revision=source.revision or "main",
            trust_remote_code=runs_own_code(source, config),
        )
    except Exception as error:  # each architecture and file format fails in its own way
        raise explain(name, config, error) from error
    module, loading = loaded
    if not isinstance(module, PreTrainedModel):
        raise UnsupportedModelError(f"model {name!r} is not a transformers model")
    _check_keys(_kind(name, config), module, loading)
    quantizing.settle(module)
    return module


def build_without_weights(
    name: AnyModel, config: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """The model as `load_weights` loads it, on the meta device; raises UnsupportedModelError."""
    check_class(name, config)
    attention.register()
    arguments: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "attn_implementation": attention.ATTENTION_NAME,
        # the grouped products of torch have no shapes but those of bfloat16
        "experts_implementation": "batched_mm",
    }
    try:
        with torch.device("meta"):
            own = _class_of(name, config)
            if config.model_type in REWRITTEN:
                module: Any = own._from_config(**arguments)
            else:
                module = own.from_config(**arguments, trust_remote_code=runs_own_code(name, config))
    except Exception as error:  # each architecture fails in its own way
        raise explain(name, config, error) from error
    assert isinstance(module, PreTrainedModel)
    module.train(mode=False)
    return module


def runs_own_code(name: AnyModel, config: PreTrainedConfig) -> bool:
    """Whether the model's own Python code makes its forward: where transformers has none for its
    type, and the model is trusted."""
    is_known = config.model_type in CONFIG_MAPPING
    return ModelSource.of(name).trust_remote_code and not is_known


def check_class(name: AnyModel, config: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError unless transformers has a causal language model of this kind."""
    kind = _kind(name, config)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{kind} is an encoder-decoder, no causal language model; only decoders can be served"
        )
    brings_class = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if runs_own_code(name, config) and brings_class:
        return
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    if not any(type(config) in mapping for mapping in mappings):
        if config.get_text_config(decoder=True) is not config:
            raise UnsupportedModelError(
                f"{kind} is a language model inside a multimodal wrapper that transformers does "
                "not list for images and text; use a checkpoint of the language model alone"
            )
        raise UnsupportedModelError(
            f"{kind} is no causal language model: transformers has no such class for its kind, as "
            "for encoders and for models of images or sound"
        )
    for rope_type in _rope_types(getattr(config.get_text_config(), "rope_parameters", None)):
        if rope_type not in ROPE_INIT_FUNCTIONS and rope_type != "default":
            raise UnsupportedModelError(
                f"{kind} has rope_type {rope_type!r}, which transformers does not know; it knows "
                f"default, {', '.join(ROPE_INIT_FUNCTIONS)}"
            )


def _class_of(name: AnyModel, config: PreTrainedConfig) -> Any:
    """What makes a model of this kind: for some wrappers, only with all that they wrap."""
    if config.model_type in REWRITTEN:
        return REWRITTEN[config.model_type]
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or runs_own_code(name, config):
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def explain(name: AnyModel, config: PreTrainedConfig, error: Exception) -> ConfigError:
    """The error to raise for a failure to load, in words for whoever has named the model."""
    kind = _kind(name, config)
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return ConfigError(
            f"{kind} does not fit into the memory of its device; use a smaller model, a smaller "
            f"dtype, or more ranks (tensor_parallel_size): {first_line(error)}"
        )
    if isinstance(error, KeyError) and attention.ATTENTION_NAME in str(error):
        return UnsupportedModelError(
            f"{kind} cannot be served: it has attention classes of its own, and does not go "
            "through transformers' attention interface"
        )
    if isinstance(error.__cause__, GatedRepoError):
        return explain_gate(name)
    if isinstance(error, OSError):
        return ModelNotFoundError(f"{kind} cannot be read: {first_line(error)}")
    return UnsupportedModelError(
        f"{kind} cannot be loaded as a causal language model: {type(error).__name__}: "
        f"{first_line(error)}"
    )


def _kind(name: AnyModel, config: PreTrainedConfig) -> str:
    return f"model {name!r} ({config.model_type})"


def _rope_types(parameters: Any) -> Iterable[str]:
    """Yield the rope type of all layers, or that of each type of layers."""
    if not isinstance(parameters, dict):
        return
    if "rope_type" in parameters:
        yield str(parameters["rope_type"])
    for nested in parameters.values():
        if isinstance(nested, dict):
            yield from _rope_types(nested)


def _compute_dtype(config: PreTrainedConfig, dtype: torch.dtype | str) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else own_dtype(config) or torch.float32


def _check_dtype(name: AnyModel, config: PreTrainedConfig, dtype: torch.dtype | str) -> None:
    declared = quantization.declared_in(config.to_dict())
    method = quantization.method_of(declared) if declared else None
    if method in quantization.UNPACKED_TO_BF16 and dtype not in ("auto", torch.bfloat16):
        raise ConfigError(
            f"dtype is {str(dtype).removeprefix('torch.')!r}, but the weights of {name!r} are "
            f"quantized ({method}), and become bfloat16; use dtype=auto or dtype=bfloat16"
        )


def _check_keys(kind: str, module: PreTrainedModel, loading: dict[str, Any]) -> None:
    """Raise unless the checkpoint holds just what the model needs, as far as that can be known."""
    if loading["mismatched_keys"]:
        key, found, wanted = min(loading["mismatched_keys"])
        raise UnsupportedModelError(
            f"{kind}: weights and config.json do not belong together: {key!r} has the shape "
            f"{list(found)} in the checkpoint and {list(wanted)} by config.json"
        )
    ignored = ignored_keys(module, loading["unexpected_keys"])
    if ignored:
        raise UnsupportedModelError(
            f"{kind} holds more than transformers reads for a layer ({ignored[0]!r}), such as the "
            "scale of a quantized weight, so it would be misread; use its unquantized weights"
        )
    missing = sorted(loading["missing_keys"])
    if not missing:
        return
    if not any(key.startswith(f"{module.base_model_prefix}.") for key in missing):
        raise UnsupportedModelError(
            f"{kind} is no causal language model: its checkpoint lacks {missing[0]!r}, as that of "
            "an embedding model, a classifier or a bare base model does"
        )
    raise DamagedModelError(
        f"{kind} is incomplete: its checkpoint lacks {len(missing)} of the model's weights, such "
        f"as {missing[0]!r}; get it again"
    )


def ignored_keys(module: nn.Module, unexpected: Collection[str]) -> list[str]:
    """Tensors of the checkpoint that belong to a layer which has been loaded without them.

    Whole parts that the model lacks, as layers for more than one next token or the towers of a
    multimodal model, change nothing. A scale, a zero point or a bias beside a weight does, and so
    does what lies deeper in such a layer, as an adapter that was not merged.
    """
    layers = {name: layer for name, layer in module.named_modules() if name}
    ignored = []
    for key in sorted(unexpected):
        parent = key.rpartition(".")[0]
        is_direct = parent in layers
        while parent and parent not in layers:
            parent = parent.rpartition(".")[0]
        if parent and _has_weights(layers[parent], and_no_others=not is_direct):
            ignored.append(key)
    return ignored


def _has_weights(layer: nn.Module, *, and_no_others: bool) -> bool:
    """Whether a layer has weights of its own, and, if asked for, no others in its parts."""
    num_own = len(list(layer.parameters(recurse=False)))
    return num_own > 0 and (not and_no_others or num_own == len(list(layer.parameters())))
