"""Top-k and top-p by the highest scores of a row, against a sort of all of them."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from workers import truncation
from workers.sampling_params import SamplingParams
from workers.truncation import NUMS_SORTED, scale_and_truncate

VOCAB_SIZE = NUMS_SORTED[-1] + 1000
FLAT, PEAKED = 0.3, 12.0
"""Standard deviations of logits: of FLAT ones, half of the tokens make most of the law."""


def make_scores(spread: float, *, num_rows: int = 1, rounded: bool = False) -> Tensor:
    scores = torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * spread
    return scores.round() if rounded else scores


def sorted_all(scores: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """One row, by definition, where the lowest of equal ids comes first; and which of its tokens
    are so near to top-p's edge that rounding decides."""
    order = scores[0].sort(descending=True, stable=True).indices
    if params.top_k:
        order = order[: params.top_k]
    total = scores[0, order].softmax(-1).cumsum(-1)
    has_top_p = bool(torch.tensor(params.top_p) < 1.0)  # in fp32
    kept = order[: int((total < params.top_p).sum()) + 1] if has_top_p else order
    expected = torch.full_like(scores, float("-inf"))
    expected[0, kept] = scores[0, kept]
    is_near = torch.zeros_like(scores, dtype=torch.bool)
    before = total.roll(1)
    is_near[0, order] = ((before - params.top_p).abs() < 1e-6) & has_top_p
    return expected, is_near


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
    SamplingParams(top_p=1.0 - 1e-9),
]


@pytest.mark.parametrize("params", CUTS, ids=str)
@pytest.mark.parametrize("spread", [FLAT, PEAKED])
@pytest.mark.parametrize("rounded", [False, True], ids=["all differ", "many are equal"])
def test_what_is_kept_is_what_a_sort_keeps(
    params: SamplingParams, spread: float, rounded: bool
) -> None:
    scores = make_scores(spread, rounded=rounded)
    expected, is_near = sorted_all(scores, params)
    scale_and_truncate(scores, [params])
    differs = scores != expected
    assert not (differs & ~is_near).any()
    assert is_near.sum() < 5


@pytest.mark.parametrize(
    ("spread", "top_p", "num_sorts"), [(PEAKED, 0.9, 1), (FLAT, 0.7, 2), (FLAT, 0.999, 3)]
)
def test_no_more_is_sorted_than_is_needed(
    spread: float, top_p: float, num_sorts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def edges(scores: Tensor, params: Sequence[SamplingParams], num_sorted: int) -> object:
        seen.append(num_sorted)
        return find_edges(scores, params, num_sorted)

    find_edges = truncation._edges
    monkeypatch.setattr(truncation, "_edges", edges)
    scale_and_truncate(make_scores(spread), [SamplingParams(top_p=top_p)])
    assert seen == [*NUMS_SORTED, VOCAB_SIZE][:num_sorts]
    assert len(seen) == num_sorts


@pytest.mark.parametrize("spread", [FLAT, PEAKED])
def test_a_row_does_not_depend_on_those_beside_it(spread: float) -> None:
    params = [*CUTS, SamplingParams(), SamplingParams(min_p=0.1)]
    scores = make_scores(spread, num_rows=len(params), rounded=True)
    together, alone = scores.clone(), scores
    scale_and_truncate(together, params)
    for row, each in enumerate(params):
        scale_and_truncate(alone[row : row + 1], [each])
    assert torch.equal(together, alone)


def test_a_row_without_numbers_stays_without() -> None:
    scores = make_scores(FLAT)
    scores[0, 7] = float("nan")
    scale_and_truncate(scores, [SamplingParams(top_k=5, top_p=0.9)])
    assert not scores.max().isfinite()
