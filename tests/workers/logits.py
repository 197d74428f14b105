"""Logits of random rows, and what is asked of them."""

import torch

from workers.sampling import SamplingRow
from workers.sampling_params import SamplingParams

VOCAB_SIZE = 50


def make_row(
    seed: int = 0, position: int = 0, allowed: torch.Tensor | None = None, **params: object
) -> SamplingRow:
    return SamplingRow(
        params=SamplingParams(**params), seed=seed, position=position, allowed=allowed
    )


def make_logits(num_rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2
