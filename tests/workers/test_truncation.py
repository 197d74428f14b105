"""Top-k and top-p by the highest scores of a row, against a sort of all of them."""

import pytest
import torch
from torch import Tensor

from workers.sampling_params import SamplingParams
from workers.truncation import NUMS_SORTED, scale_and_truncate

VOCAB_SIZE = NUMS_SORTED[-1] + 1000
FLAT, PEAKED = 0.3, 4.0
"""Standard deviations of logits: of FLAT ones, half of the tokens make most of the law."""


def make_scores(spread: float, *, num_rows: int = 1, rounded: bool = False) -> Tensor:
    scores = torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * spread
    return scores.round() if rounded else scores


def sorted_all(scores: Tensor, params: SamplingParams) -> Tensor:
    """One row, by definition; the lowest of equal ids comes first."""
    order = scores[0].sort(descending=True, stable=True).indices
    if params.top_k:
        order = order[: params.top_k]
    probabilities = scores[0, order].softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    kept = order[(before < params.top_p) | (before == 0)]
    expected = torch.full_like(scores, float("-inf"))
    expected[0, kept] = scores[0, kept]
    return expected


CUTS = [
    SamplingParams(top_k=1),
    SamplingParams(top_k=50, top_p=0.9),
    SamplingParams(top_k=NUMS_SORTED[0]),
    SamplingParams(top_k=NUMS_SORTED[0] + 1, top_p=0.999),
    SamplingParams(top_k=NUMS_SORTED[1] + 1, top_p=0.99),
    SamplingParams(top_k=VOCAB_SIZE + 1, top_p=0.5),
    SamplingParams(top_p=0.05),
    SamplingParams(top_p=0.7),
    SamplingParams(top_p=0.98),
]


@pytest.mark.parametrize("params", CUTS, ids=str)
@pytest.mark.parametrize("spread", [FLAT, PEAKED])
@pytest.mark.parametrize("rounded", [False, True], ids=["all differ", "many are equal"])
def test_what_is_kept_is_what_a_sort_keeps(
    params: SamplingParams, spread: float, rounded: bool
) -> None:
    scores = make_scores(spread, rounded=rounded)
    kept = scale_and_truncate(scores, [params])
    expected = sorted_all(scores, params)
    # sums in another order may tell the edge of top-p apart from its neighbour
    assert (kept.isfinite() != expected.isfinite()).sum() <= 1
    assert torch.equal(kept[kept.isfinite()], scores[kept.isfinite()])


@pytest.mark.parametrize("spread", [FLAT, PEAKED])
def test_a_row_does_not_depend_on_those_beside_it(spread: float) -> None:
    params = [*CUTS, SamplingParams(), SamplingParams(min_p=0.1)]
    scores = make_scores(spread, num_rows=len(params), rounded=True)
    together = scale_and_truncate(scores, params)
    alone = [scale_and_truncate(scores[i : i + 1], [each]) for i, each in enumerate(params)]
    assert torch.equal(together, torch.cat(alone))


def test_a_row_without_numbers_stays_without() -> None:
    scores = make_scores(FLAT)
    scores[0, 7] = float("nan")
    kept = scale_and_truncate(scores, [SamplingParams(top_k=5, top_p=0.9)])
    assert not kept.max().isfinite()
