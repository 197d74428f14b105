"""Packed linear layers against the ones they replace."""

import pytest
import torch
from torch import nn

from workers import packed_linear
from workers.packed_linear import PackedLinear, pack_linears

needs_kernels = pytest.mark.skipif(
    not packed_linear.has_kernels(), reason="no packed bf16 products on this CPU"
)


@needs_kernels
@pytest.mark.parametrize("num_tokens", [1, 5, 64])
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_those_of_the_plain_layer(num_tokens: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 200, bias=bias, dtype=torch.bfloat16)
    inputs = torch.randn(1, num_tokens, 96, dtype=torch.bfloat16)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear)(inputs), linear(inputs))


@needs_kernels
def test_only_plain_bf16_layers_are_packed() -> None:
    class Special(nn.Linear):
        pass

    module = nn.Sequential(
        nn.Linear(8, 8, dtype=torch.bfloat16),
        nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8)),
        Special(8, 8, dtype=torch.bfloat16),
    )
    assert pack_linears(module) == 2
    kinds = [type(child) for child in module.modules() if not isinstance(child, nn.Sequential)]
    assert kinds == [PackedLinear, PackedLinear, nn.Linear, Special]


def test_nothing_is_packed_where_torch_lacks_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "has_kernels", lambda: False)
    module = nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16))
    assert pack_linears(module) == 0
    assert type(module[0]) is nn.Linear
