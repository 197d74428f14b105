"""Temperature, top-k, top-p and min-p: what is left of the laws that tokens are sampled from."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.sampling_params import SamplingParams

NUMS_SORTED = (256, 8192)
"""How many of a row's highest scores are sorted at first, and then: all, where those are not enough
for top-k and top-p."""


def scale_and_truncate(scores: Tensor, params: Sequence[SamplingParams]) -> None:
    """Temperature, top-k, top-p, min-p, in place.  # [num_rows, vocab]"""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=scores.device)[:, None]

    scores /= column([p.temperature for p in params])
    _keep_top(scores, params)
    if any(p.min_p > 0 for p in params):
        # p_v >= min_p * p_max, in logarithms: log 0 keeps every token
        least = scores.amax(-1, keepdim=True) + column([p.min_p for p in params]).log()
        scores.masked_fill_(scores < least, float("-inf"))


def _keep_top(scores: Tensor, params: Sequence[SamplingParams]) -> None:
    """Top-k, then top-p of what top-k left, in place; ties at the edge go to the lower token id.

    Mostly a few of a row's highest scores settle it, and to sort all takes tens of times as long.
    # [num_rows, vocab]
    """
    vocab_size = scores.shape[-1]
    rows = [row for row, p in enumerate(params) if 0 < p.top_k < vocab_size or p.top_p < 1.0]
    if not rows:
        return
    edges = torch.full_like(scores[:, :1], float("-inf"))
    # how many scores are kept in all, of rows where more may be at the edge; 0 of others
    ties: dict[int, int] = {}
    for num_sorted in (*(num for num in NUMS_SORTED if num < vocab_size), vocab_size):
        if not rows:
            break
        own = scores if len(rows) == len(scores) else scores[rows]
        found = _edges(own, [params[row] for row in rows], num_sorted)
        edges[rows] = found.scores
        ties |= dict(zip(rows, found.nums_tied, strict=True))
        rows = [row for row, is_it in zip(rows, found.are_settled, strict=True) if not is_it]
    scores.masked_fill_(scores < edges, float("-inf"))
    for row, num_kept in ties.items():
        if num_kept > 0:
            at_edge = (scores[row] == edges[row]).nonzero()[:, 0]
            num_over = int((scores[row] >= edges[row]).sum()) - num_kept
            scores[row, at_edge[len(at_edge) - num_over :]] = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edges:
    """Where top-k and top-p cut some rows."""

    scores: Tensor
    """The lowest score that is kept.  # [num_rows, 1]"""
    nums_tied: list[int]
    """How many are kept where others may have that score too, else 0."""
    are_settled: list[bool]
    """Whether as many of the highest scores as were sorted are enough to tell."""


def _edges(scores: Tensor, params: Sequence[SamplingParams], num_sorted: int) -> _Edges:
    """The edges by the `num_sorted` highest scores of each row.  # [num_rows, vocab]"""
    vocab_size = scores.shape[-1]
    nums = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    top_k = torch.tensor(nums, device=scores.device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], device=scores.device)[:, None]
    highest, order = scores.topk(num_sorted, dim=-1)
    in_top_k = torch.arange(num_sorted, device=scores.device) < top_k
    probabilities = highest.masked_fill(~in_top_k, float("-inf")).softmax(-1)
    if max(nums) == vocab_size:
        of_all = scores.softmax(-1).gather(-1, order)
        probabilities = torch.where(top_k < vocab_size, probabilities, of_all)
    total = probabilities.cumsum(-1)
    # a token stays while what stands before it has not reached top_p: the first always stays
    is_kept = in_top_k & ((total.roll(1, -1) < top_p) | (top_p >= 1.0))
    is_kept[:, 0] = True
    num_kept = is_kept.sum(-1, keepdim=True)
    edge = highest.gather(-1, num_kept - 1)
    # the highest that is not kept, or the last one, behind which there may be more
    behind = highest.gather(-1, num_kept.clamp(max=num_sorted - 1))
    has_reached = (total[:, -1:] >= top_p) & (top_p < 1.0)  # which may be rounded to 1
    is_enough = torch.where(top_k < vocab_size, top_k <= num_sorted, has_reached)
    return _Edges(
        scores=edge,
        nums_tied=torch.where(behind == edge, num_kept, 0)[:, 0].tolist(),
        are_settled=[num_sorted == vocab_size or is_it for is_it in is_enough[:, 0].tolist()],
    )
