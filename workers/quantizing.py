"""Models whose weights are quantized as they are loaded: what is asked of transformers, and what
comes of it.

The products stay those of the weights that were rounded, with inputs that are not (`int8`,
`bnb_nf4`), or by rows that are rounded one by one (`bnb_int8`): in any case a token's numbers
depend on nothing else that a step runs. Embeddings and the head keep their precision, as
transformers has it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig, PreTrainedModel, TorchAoConfig
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from workers.errors import ConfigError, UnsupportedModelError
from workers.model_source import AnyModel
from workers.nf4 import BLOCK_SIZE, Nf4Config
from workers.quantization import (
    PACKAGES_OF,
    Quantization,
    declared_in,
    is_installed,
    method_of,
)

SCALE_BYTES = 4


def check_quantization(
    name: AnyModel,
    config: Mapping[str, Any],
    quantization: Quantization,
    device: torch.device,
    *,
    option: str = "quantization",
) -> None:
    """Raise ConfigError unless a model's weights can be quantized so on that device.

    Args:
        config: the content of its config.json.
        option: the option that says so, for the sentence.
    """
    if quantization == "none":
        return
    if (declared := declared_in(config)) is not None:
        how = method_of(declared) or "a method of its own"
        raise ConfigError(
            f"{option} is {quantization!r}, but the weights of {name!r} are quantized already "
            f"({how}); leave the option out, or give the unquantized model"
        )
    package = PACKAGES_OF[quantization]
    if not is_installed(package):
        raise ConfigError(
            f"{option} is {quantization!r}, which needs the package {package}, not installed "
            "here; run pip install 'tandem-serve[quantization]'"
        )
    if package == "bitsandbytes" and device.type not in _devices_of_bitsandbytes():
        raise ConfigError(
            f"{option} is {quantization!r}, but the installed bitsandbytes has nothing for "
            f"{device.type!r}; use {option}=int8"
        )


def check_layers(name: AnyModel, module: PreTrainedModel, quantization: Quantization) -> None:
    """Raise UnsupportedModelError where a model, as it is on the meta device, would stay as it is.

    Transformers' quantizers pass over layers of a kind that they do not know, and say nothing.
    """
    if quantization == "none" or _takes_some(module, quantization):
        return
    others = [other for other in PACKAGES_OF if _takes_some(module, other)]
    raise UnsupportedModelError(
        f"model {name!r} ({module.config.model_type}) has no layers of the kind that "
        f"{PACKAGES_OF[quantization]} quantizes, so {quantization} would leave it as it is; "
        + (f"use {' or '.join(others)}, or no quantization" if others else "do not quantize it")
    )


def _takes_some(module: PreTrainedModel, quantization: Quantization) -> bool:
    return next(_weights_to_quantize(module, quantization), None) is not None


def _devices_of_bitsandbytes() -> frozenset[str]:
    import bitsandbytes

    return frozenset(bitsandbytes.supported_torch_devices)


def loading_options(quantization: Quantization, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of `from_pretrained` by which it quantizes; none for `none`.

    Args:
        dtype: to compute in.
    """
    match quantization:
        case "none":
            return {}
        case "int8":
            from torchao.quantization import Int8WeightOnlyConfig

            # of the compiler's settings, which are the whole process's, none is to change
            how = Int8WeightOnlyConfig(set_inductor_config=False)
            return {"quantization_config": TorchAoConfig(how)}
        case "bnb_int8":
            # Columns with outliers would be multiplied apart, and which those are depends on all
            # rows of a step: a token's numbers would depend on what else is served.
            how = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
        case "bnb_nf4":
            how = Nf4Config(bnb_4bit_compute_dtype=dtype)
    return {"quantization_config": how}


def settle(module: PreTrainedModel) -> None:
    """Undo what bitsandbytes would do for speed: in float32, its product on a CPU rounds inputs to
    bfloat16, and lays out weights anew when they are first used."""
    for layer in module.modules():
        if getattr(layer, "support_avx512bf16_for_cpu", False):
            layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def weight_bytes(module: nn.Module) -> int:
    """Bytes of a model's parameters, with the scales of those that are quantized."""
    # in 8 bits, the first call of a layer takes the scales from its weight
    states = (getattr(layer, "state", None) for layer in module.modules())
    taken = (getattr(state, "SCB", None) for state in states)
    num_taken: int = sum(scales.nbytes for scales in taken if scales is not None)
    return sum(map(_stored_bytes, module.parameters())) + num_taken


def _stored_bytes(weight: Tensor) -> int:
    is_shared = isinstance(weight, DTensor)  # by ranks, of which this is what all have together
    if hasattr(weight, "__tensor_flatten__") and not is_shared:  # of torchao: several tensors
        return sum(getattr(weight, name).nbytes for name in weight.__tensor_flatten__()[0])
    state = getattr(weight, "quant_state", None)  # of bitsandbytes in 4 bits
    scales = getattr(weight, "SCB", None) if state is None else state.absmax  # and in 8
    return weight.nbytes + (0 if scales is None else scales.nbytes)


def planned_bytes(module: PreTrainedModel, quantization: Quantization) -> int:
    """What `weight_bytes` will be once a model, as it is on the meta device, has been loaded so."""
    total = weight_bytes(module)
    for weight in _weights_to_quantize(module, quantization):
        num_out = weight.shape[0]
        match quantization:
            case "int8":  # a scale and a zero point for each output
                stored = weight.numel() + num_out * (SCALE_BYTES + 1)
            case "bnb_int8":
                stored = weight.numel() + num_out * SCALE_BYTES
            case _:
                stored = -(-weight.numel() // 2) + -(-weight.numel() // BLOCK_SIZE) * SCALE_BYTES
        total += stored - weight.nbytes
    return total


def _weights_to_quantize(module: PreTrainedModel, quantization: Quantization) -> Iterator[Tensor]:
    """Yield those that transformers' quantizers take.  # [out_features, in_features]"""
    if quantization == "none":
        return
    in_fp32 = list(module._keep_in_fp32_modules or ())
    kept = HfQuantizer.get_modules_to_not_convert(module, None, in_fp32)
    for name, layer in module.named_modules():
        if not should_convert_module(name, kept):
            continue
        # bitsandbytes leaves classes that do more than multiply, like routers of experts
        if type(layer) is nn.Linear or (quantization == "int8" and isinstance(layer, nn.Linear)):
            yield layer.weight
        elif isinstance(layer, Conv1D) and quantization != "int8":
            yield layer.weight.T
