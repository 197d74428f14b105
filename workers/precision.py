"""The precision that a model is served in, and what that means for its texts.

A text must not depend on drafts or on what else is served. So a token's logits have to be the same
in a step of any size: our own products on a CPU see to that in float32 and bfloat16, and there are
none for float16 (see `packed_linear`).
"""

import torch
from torch import nn
from transformers import PreTrainedConfig

from workers.cpu.packed_linear import PackedLinear

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def own_dtype(config: PreTrainedConfig) -> torch.dtype | None:
    """The dtype that config.json names; None if it names none that is known."""
    own = config.dtype or config.get_text_config().dtype
    return DTYPES.get(own) if isinstance(own, str) else own


def chosen_dtype(asked: str, config: PreTrainedConfig, *, on_cpu: bool) -> torch.dtype | None:
    """What to load the weights in; None leaves it to the checkpoint.

    Args:
        asked: "auto" or a name of DTYPES.
    """
    if asked != "auto":
        return DTYPES[asked]
    is_quantized = getattr(config, "quantization_config", None) is not None
    if not is_quantized and is_widened(own_dtype(config), on_cpu=on_cpu):
        return torch.float32
    return None


def is_widened(own: torch.dtype | None, *, on_cpu: bool) -> bool:
    """Whether dtype=auto takes a checkpoint of this dtype as float32.

    That changes no weight. It takes twice the memory, and a step of several tokens is faster.
    """
    return on_cpu and own == torch.float16


def text_warnings(name: str, module: nn.Module) -> tuple[str, ...]:
    """Why the texts of a loaded model may depend on more than its weights; empty if not.

    Only a CPU's lower precisions are warned of: in float32 the differences are too small.
    """
    weight = next(module.parameters())
    if (
        weight.device.type != "cpu"
        or weight.dtype == torch.float32
        or not _has_other_products(module)
    ):
        return ()
    dtype = str(weight.dtype).removeprefix("torch.")
    return (
        f"{name} runs in {dtype}, with products whose last bits depend on how many tokens a step "
        "has: where two tokens are nearly as likely as each other, a text may depend on drafts and "
        "on what else is served; dtype=float32 rules that out",
    )


def _has_other_products(module: nn.Module) -> bool:
    """Whether some weights are not multiplied by our own kernel, which takes parameters away."""
    return any(
        isinstance(layer, PackedLinear)
        or any(weight.ndim > 1 for weight in layer.parameters(recurse=False))
        for layer in module.modules()
        if not isinstance(layer, nn.Embedding)
    )
