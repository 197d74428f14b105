"""Which quantized checkpoints are served: those that transformers is known to read right.

Transformers passes over a method that it does not know, and loads packed or scaled numbers as if
they were the weights. So a checkpoint is refused unless its method is known and can be run here.
"""

import importlib.util
from collections.abc import Mapping
from typing import Any, Literal

from workers.errors import UnsupportedModelError
from workers.model_source import AnyModel

Quantization = Literal["none", "int8", "bnb_int8", "bnb_nf4"]
"""How weights are quantized as they are loaded; see `quantizing`."""

PACKAGES_OF: Mapping[Quantization, str] = {
    "int8": "torchao",
    "bnb_int8": "bitsandbytes",
    "bnb_nf4": "bitsandbytes",
}
# By method of a checkpoint, the packages without which transformers cannot read such weights.
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "fp8": (),
    "mxfp4": (),
    "bitnet": (),
    "aqlm": ("aqlm",),
    "auto-round": ("auto_round",),
    "awq": ("gptqmodel",),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed_tensors",),
    "gptq": ("optimum", "gptqmodel"),
    "hqq": ("hqq",),
    "quark": ("quark",),
    "torchao": ("torchao",),
    "vptq": ("vptq",),
}
# Methods whose weights become bfloat16 whatever dtype the rest of the model is given.
UNPACKED_TO_BF16 = frozenset({"fp8"})
# Formats of safetensors in which nobody stores weights that are not quantized.
QUANTIZED_DTYPES = ("F8_", "F6_", "F4")
INTEGER_DTYPES = frozenset({"I8", "U8", "I16", "I32"})
KEYS = ("quantization_config", "compression_config", "quantization")


def declared_in(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a raw config.json says of how the weights are quantized; None if it says nothing."""
    for part in (config, config.get("text_config") or {}):
        for key in KEYS:
            if isinstance(part.get(key), dict) and part[key]:
                declared: Mapping[str, Any] = part[key]
                return declared
    return None


def method_of(declared: Mapping[str, Any]) -> str | None:
    """The method's name, in transformers' words; None if it is not named."""
    if declared.get("load_in_8bit") or declared.get("load_in_4bit"):
        return "bitsandbytes"
    method = declared.get("quant_method")
    return method if isinstance(method, str) else None


def check_method(name: AnyModel, declared: Mapping[str, Any] | None) -> None:
    """Raise UnsupportedModelError unless weights that are quantized so can be read here."""
    if declared is None:
        return
    method = method_of(declared)
    if method is None or method not in PACKAGES:
        how = f"quantized with {method!r}" if method else "quantized by a method it does not name"
        raise UnsupportedModelError(
            f"model {name!r} is {how}, which would be misread; use its unquantized weights, or "
            f"ones quantized with {', '.join(PACKAGES)}"
        )
    missing = [package for package in PACKAGES[method] if not is_installed(package)]
    if missing:
        raise UnsupportedModelError(
            f"model {name!r} is quantized with {method!r}, which needs the package "
            f"{' and '.join(missing)}, not installed here; install it, or use the "
            "unquantized weights"
        )


def check_dtypes(name: AnyModel, dtypes: Mapping[str, str]) -> None:
    """Raise UnsupportedModelError if weights are quantized that config.json says nothing of.

    Args:
        dtypes: of each tensor, in the words of safetensors.
    """
    for key, dtype in dtypes.items():
        is_integer_weight = dtype in INTEGER_DTYPES and key.endswith("weight")
        if dtype.startswith(QUANTIZED_DTYPES) or is_integer_weight:
            raise UnsupportedModelError(
                f"model {name!r} holds quantized weights ({key!r} is {dtype}), but its config.json "
                "does not say how they are quantized, so they would be misread; use its "
                "unquantized weights"
            )


def is_installed(package: str) -> bool:
    """Whether a package can be imported here, which is not tried."""
    return importlib.util.find_spec(package) is not None
