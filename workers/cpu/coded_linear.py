"""Linear layers whose weights were quantized by torchao or bitsandbytes, for our kernel on a CPU.

The packages' own products make a float matrix of all weights in every step, and round a token's
numbers by how many others the step has. Here the codes come from memory as they are, so that a step
reads a quarter or an eighth of float32's bytes, and a token's result is the same in any batch.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.cpu import huge_pages
from workers.cpu.weight_facts import WeightFacts

BLOCK = 16
"""Outputs whose codes lie together; see `csrc/streamed_layer.h`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCodes:
    """A quantized weight. A code's number, times the scale of its group of inputs, is the weight's.

    Of int8 codes, the number is the code itself; of those of 4 bits, the table's.
    """

    codes: Tensor  # int8 [out_features, in_features], or uint8 [out_features, in_features / 2]
    scales: Tensor  # float32 [out_features, groups of as many inputs]
    table: Tensor | None  # float32 [16]


class CodedLinear(nn.Module):
    """A linear layer for inference.  # [..., in_features] -> [..., out_features]

    The operator of `csrc/coded_linear.cpp`, whose sums are in float32.
    """

    def __init__(self, linear: nn.Linear, weight: WeightCodes) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = WeightFacts(
            shape=torch.Size((self.out_features, self.in_features)),
            dtype=getattr(linear, "compute_dtype", linear.weight.dtype),
            device=linear.weight.device,
        )
        codes = huge_pages.moved(torch.ops.tandem.stream_weight(weight.codes))
        padding = -self.out_features % BLOCK
        scales = F.pad(weight.scales, (0, 0, 0, padding)).unflatten(0, (-1, BLOCK)).mT.contiguous()
        bias = None if linear.bias is None else linear.bias.detach().float()
        self.register_buffer("_codes", codes, persistent=False)
        self.register_buffer("_scales", scales, persistent=False)
        self.register_buffer("_table", weight.table, persistent=False)
        self.register_buffer("_bias", bias, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = torch.ops.tandem.coded_linear(
            inputs, self._codes, self._scales, self._table, self._bias, self.out_features
        )
        return output


def find_codes(linear: nn.Linear) -> WeightCodes | None:
    """What a quantized layer has in place of a weight; None of any other, or if it is not for us.

    The packages are not imported: who has no such layer need not have them.
    """
    weight: Any = linear.weight
    match type(weight).__name__:
        case "Int8Tensor":
            return _codes_of_torchao(weight)
        case "Params4bit":
            return _codes_of_bitsandbytes(weight, linear.in_features)
        case _:
            return None


def is_quantized(linear: nn.Linear) -> bool:
    """Whether a layer's weight is more than a tensor of numbers."""
    return type(linear.weight) not in (nn.Parameter, Tensor)


def _codes_of_torchao(weight: Any) -> WeightCodes | None:
    num_out, num_in = weight.qdata.shape
    is_shifted = weight.zero_point is not None and bool(weight.zero_point.any())
    changes_inputs = weight.act_quant_kwargs is not None or weight.act_pre_scale is not None
    if is_shifted or changes_inputs or weight.scale.numel() != num_out or num_in % 4:
        return None
    scales = weight.scale.detach().float().view(num_out, 1)
    return WeightCodes(codes=weight.qdata.detach(), scales=scales, table=None)


def _codes_of_bitsandbytes(weight: Any, in_features: int) -> WeightCodes | None:
    state = weight.quant_state
    is_laid_out_anew = getattr(state, "packing_format_for_cpu", False)
    if state.nested or is_laid_out_anew or in_features % state.blocksize or state.blocksize % 8:
        return None
    codes = weight.detach().view(torch.uint8).view(-1, in_features // 2)
    scales = state.absmax.detach().float().view(codes.shape[0], -1)
    return WeightCodes(codes=codes, scales=scales, table=state.code.detach().float())
