"""What transformers' code finds where it looks for its cache.

Keys and values are paged elsewhere, so it keeps nothing.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig


class NoCache:
    """What attention layers, and those who make masks, find in the cache that they are given."""

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Leave keys and values as they are: `paged_attention` writes them."""
        return keys, values

    def get_query_offset(self, _: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, _: int = 0) -> tuple[int, int]:
        return query_length, 0


class PastLengths(NoCache):
    """Tells layers that count their tokens how many there are before those of a batch.

    They add the numbers 0, 1, 2, ... to it and take the sums for positions. In a flattened batch
    that is another offset for each token.
    """

    def __init__(self, positions: Tensor) -> None:
        """`positions` are those of the new tokens.  # [1, N]"""
        self._positions = positions[0]

    def get_seq_length(self, _: int = 0) -> Tensor:
        """What to add to the number of each token.  # [N]"""
        num_tokens = self._positions.shape[0]
        return self._positions - torch.arange(num_tokens, device=self._positions.device)


def past_lengths(config: PreTrainedConfig, positions: Tensor) -> dict[str, PastLengths]:
    """The argument for models whose layers count tokens, of whatever config; none for others.

    Llama 4 does: layers without rotary embedding scale queries by their position.
    """
    text_config = config.get_text_config()
    is_tuned = getattr(text_config, "attn_temperature_tuning", False)
    has_layers_without_rope = not all(getattr(text_config, "no_rope_layers", None) or [True])
    if is_tuned and has_layers_without_rope:
        return {"past_key_values": PastLengths(positions)}
    return {}
