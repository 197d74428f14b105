"""Log-probabilities under the model's own law: log softmax of its logits, before anything shapes
them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.types import TokenLogprobs


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], *, num_top: int
) -> tuple[TokenLogprobs, ...]:
    """The log-probability of one token for each row, and those of the `num_top` likeliest tokens in
    its place.

    The likeliest come first, and of equals the lower token id, as the sampler has it.

    Shapes: logits [num_rows, vocab], any float dtype; tokens [num_rows].
    """
    scores = logits.float()
    law = scores.log_softmax(dim=-1)
    index = torch.tensor(tokens, dtype=torch.long, device=law.device)
    own: list[float] = law.gather(-1, index[:, None])[:, 0].tolist()
    if num_top == 0:
        return tuple(TokenLogprobs(logprob=logprob) for logprob in own)
    likeliest = _likeliest(scores, num_top)
    tops = zip(likeliest.tolist(), law.gather(-1, likeliest).tolist(), strict=True)
    return tuple(
        TokenLogprobs(logprob=logprob, top=tuple(zip(*top, strict=True)))
        for logprob, top in zip(own, tops, strict=True)
    )


def _likeliest(scores: Tensor, num_top: int) -> Tensor:
    """The ids of each row's likeliest tokens, in order.  # [num_rows, min(num_top, vocab)]"""
    num_top = min(num_top, scores.shape[-1])
    # one more, to see whether the last of them has an equal
    values, ids = scores.topk(min(num_top + 1, scores.shape[-1]), dim=-1)
    likeliest = ids[:, :num_top].clone()
    has_equals = (values[:, 1:] == values[:, :-1]).any(dim=-1)
    for row in has_equals.nonzero()[:, 0].tolist():  # `topk` promises no order of equals
        candidates = (scores[row] >= values[row, num_top - 1]).nonzero()[:, 0]
        order = scores[row, candidates].sort(descending=True, stable=True).indices
        likeliest[row] = candidates[order[:num_top]]
    return likeliest
