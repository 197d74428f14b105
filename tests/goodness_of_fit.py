"""Pearson's chi-square test, by torch's incomplete gamma function."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

Numbers = Sequence[float] | Tensor


def chisquare_pvalue(observed: Numbers, expected: Numbers) -> float:
    """The probability of counts that are at least so far from the expected ones.

    Q((n - 1) / 2, x / 2) with x = sum (observed - expected)^2 / expected over n counts.
    """
    seen, wanted = (torch.as_tensor(each, dtype=torch.float64) for each in (observed, expected))
    assert float(seen.sum()) == pytest.approx(float(wanted.sum()), rel=1e-5)
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor(len(seen) - 1.0, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))
