"""Log-probabilities under the model's own law: log softmax of its logits, before anything shapes
them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.types import TokenLogprobs

_LOW_31_BITS = 0x7FFFFFFF


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], *, num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Of one token for each row, and of the `num_top` likeliest tokens in its place.

    The likeliest come first, and of equals the lower token id, as the sampler has it.

    Shapes: logits [num_rows, vocab], any float dtype; tokens [num_rows].
    """
    law = logits.float().log_softmax(dim=-1)
    index = torch.tensor(tokens, dtype=torch.long, device=law.device)
    own: list[float] = law.gather(-1, index[:, None])[:, 0].tolist()
    if num_top == 0:
        return tuple(TokenLogprobs(logprob=logprob) for logprob in own)
    likeliest = _likeliest(logits, num_top)
    tops = zip(likeliest.tolist(), law.gather(-1, likeliest).tolist(), strict=True)
    return tuple(
        TokenLogprobs(logprob=logprob, top=tuple(zip(*top, strict=True)))
        for logprob, top in zip(own, tops, strict=True)
    )


def _likeliest(logits: Tensor, num_top: int) -> Tensor:
    """Token ids, in order.  # [num_rows, min(num_top, vocab)]

    `topk` promises no order of equals, so it is given whole numbers that have none: a score's bits,
    which are ordered as scores are once those of negative ones are turned over, then the token id.
    """
    vocab_size = logits.shape[-1]
    bits = (logits.float() + 0.0).view(torch.int32).long()  # -0.0 + 0.0 is 0.0
    ordered = torch.where(bits < 0, bits ^ _LOW_31_BITS, bits)
    keys = (ordered << 32) - torch.arange(vocab_size, device=logits.device)
    return keys.topk(min(num_top, vocab_size), dim=-1).indices
