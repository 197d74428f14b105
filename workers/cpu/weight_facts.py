"""What is left of a weight that has been laid out anew."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFacts:
    """What a module may ask of a weight that has been laid out anew; its numbers are gone.

    Some ask for the dtype, to convert their inputs to it. What would multiply by it fails.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, weight: Tensor) -> "WeightFacts":
        return cls(shape=weight.shape, dtype=weight.dtype, device=weight.device)
