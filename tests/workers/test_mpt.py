"""MPT's position bias as products of queries and keys."""

import pytest
import torch
from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor

from tests.tiny_models import make_config
from workers.mpt import _position_part, _slope_part


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_heads", [4, 6])
def test_products_are_the_bias_of_transformers_far_into_a_text(
    num_heads: int, dtype: torch.dtype
) -> None:
    """Up to a constant of each head, to which a softmax is blind."""
    length = 4096
    layer = MptAttention(make_config("mpt", n_heads=num_heads))
    heads = torch.zeros(1, length, num_heads, 1, dtype=dtype)
    queries = _slope_part(layer, layer.softmax_scale, heads[:, :1])[0, 0].float()
    keys = _position_part(torch.arange(length)[None], heads)[0].float()
    bias = torch.einsum("hd,khd->hk", queries, keys) * layer.softmax_scale
    expected = build_mpt_alibi_tensor(num_heads, length)[:, 0]
    torch.testing.assert_close(bias - bias[:, -1:], expected, atol=1e-3, rtol=1e-4)
