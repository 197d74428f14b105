"""The law that a draft was drawn from, in a few bytes: the drafter's likeliest tokens only.

A rule that compares the target's law with the drafter's needs exactly the law that the token came
from. So the drafter cuts its law before it draws, to MAX_TOKENS tokens with whole numbers as
weights, P(token) = weight / sum of weights, and what it draws from is what it sends.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_TOKENS = 64
"""The most tokens of a law: 6 bytes each; a whole vocabulary would take half a megabyte."""
LARGEST_WEIGHT = 2**16 - 1
"""The weight of a token that is certain; tokens below 1 / (2 * LARGEST_WEIGHT) are never drawn."""
_TOKEN, _WEIGHT = np.dtype("<u4"), np.dtype("<u2")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftLaw:
    """A law: some tokens and their weights."""

    tokens: NDArray[np.int64]
    """The tokens, each only once.  # [width]"""
    weights: NDArray[np.int64]
    """The weight of each token, from 1 to LARGEST_WEIGHT.  # [width]"""

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """The probability of each token.  # [width]"""
        probabilities: NDArray[np.float64] = self.weights / self.weights.sum()
        return probabilities

    def draw(self, bits: int) -> int:
        """The token that 64 random bits choose."""
        chosen = bits * int(self.weights.sum()) >> 64
        return int(self.tokens[np.searchsorted(self.weights.cumsum(), chosen, side="right")])

    def pack(self) -> bytes:
        """The law as it travels: all tokens, then all weights."""
        return self.tokens.astype(_TOKEN).tobytes() + self.weights.astype(_WEIGHT).tobytes()


def read_law(packed: bytes, token: int) -> DraftLaw:
    """The law that `token` was drawn from.

    Nothing stands for a law that has this token alone: the drafter had no choice, or does not say.
    So does what cannot be the token's law. That is exact for any token, however it was found, as
    long as nothing that decides about it is known to who found it.
    """
    width, rest = divmod(len(packed), _TOKEN.itemsize + _WEIGHT.itemsize)
    tokens = np.frombuffer(packed, _TOKEN, count=width).astype(np.int64)
    weights = np.frombuffer(packed, _WEIGHT, offset=width * _TOKEN.itemsize, count=width)
    distinct = set(tokens.tolist())
    if rest or token not in distinct or len(distinct) < width or not weights.all():
        return DraftLaw(tokens=np.array([token]), weights=np.array([1]))
    return DraftLaw(tokens=tokens, weights=weights.astype(np.int64))


def read_laws(packed: Sequence[bytes], tokens: Sequence[int]) -> list[DraftLaw]:
    """The law of each token; `packed` may be empty, if there is none for any of them."""
    laws = packed if len(packed) == len(tokens) else (b"",) * len(tokens)
    return [read_law(law, token) for law, token in zip(laws, tokens, strict=True)]


def draft_laws(logits: Tensor) -> list[DraftLaw | None]:
    """The law of each row that a drafter draws from; None where the highest is no finite number.

    The logits are those of the processed law, -inf where a token is cut off.  # [num_rows, vocab]
    """
    highest, tokens = logits.to(torch.float32).topk(min(MAX_TOKENS, logits.shape[-1]), dim=-1)
    shares = highest.double().softmax(dim=-1)
    weights = (shares * LARGEST_WEIGHT).round().nan_to_num().long().cpu().numpy()
    is_finite = highest[:, 0].isfinite().tolist()
    return [
        DraftLaw(tokens=row_tokens[row > 0], weights=row[row > 0]) if is_law else None
        for is_law, row, row_tokens in zip(is_finite, weights, tokens.cpu().numpy(), strict=True)
    ]
