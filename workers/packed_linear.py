"""Linear layers whose weights are laid out once for the CPU's matrix kernels.

In bf16 on a CPU, `torch.nn.functional.linear` rearranges the whole weight matrix in every call
before it multiplies, which for few tokens costs as much as the product itself. Here that is done at
load, in place of the original weights. The products are the same, bit for bit.
"""

import weakref

import torch
from torch import Tensor, nn

from workers import native

# The layout is chosen for products of about this many tokens: a verification's.
TYPICAL_NUM_TOKENS = 8


class PackedLinear(nn.Module):
    """A linear layer for inference.  # [..., in_features] -> [..., out_features]"""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        # opaque to all other operators, and neither parameter nor buffer: it cannot be moved
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight, TYPICAL_NUM_TOKENS)
        self._packed: Tensor | None = packed
        if native.load_operators():  # the same product, as an operator that can be compiled around
            self._packed = None
            handle = torch.ops.tandem.keep_packed(packed)
            weakref.finalize(self, torch.ops.tandem.drop_packed, handle)
            # a matrix: the compiler would write the values of small vectors into the code
            self.register_buffer("_handle", torch.tensor([[handle]]), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor
        if self._packed is None:
            output = torch.ops.tandem.packed_linear(
                inputs, self._handle, self.bias, self.out_features
            )
        else:
            output = torch.ops.mkldnn._linear_pointwise(
                inputs, self._packed, self.bias, "none", [], ""
            )
        return output


@torch.no_grad()
def pack_linears(module: nn.Module) -> int:
    """Replace the bf16 linear layers of a model on a CPU; returns how many.

    Only plain `nn.Linear` layers: others may read their weights. Where this build of torch or this
    CPU has no such kernels, none.
    """
    if not has_kernels():
        return 0
    num_packed = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and _is_packable(child.weight):
                setattr(parent, name, PackedLinear(child))
                num_packed += 1
    return num_packed


def _is_packable(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16


def has_kernels() -> bool:
    """Whether this build of torch and this CPU can multiply by packed bf16 weights."""
    return bool(
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
