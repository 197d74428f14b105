"""Products with quantized weights against those with the numbers that they stand for."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from workers.cpu.coded_linear import CodedLinear, WeightCodes, find_codes
from workers.cpu.packed_linear import has_streams

pytestmark = pytest.mark.skipif(
    not has_streams(torch.float32), reason="this CPU has no use for such streams"
)
GROUP = 64
NUM_TOKENS = (1, 2, 3, 5, 8, 12, 13, 25, 64)
of_codes = pytest.mark.parametrize("kind", ["int8", "int4"])
of_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# relative: half a unit in bf16's last place, or what fp32 sums lose; absolute: what those lose
PRECISIONS = {torch.bfloat16: (2**-8, 1e-3), torch.float32: (1e-5, 1e-3)}


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(num_threads)


def make_codes(kind: str, num_out: int, num_in: int) -> tuple[WeightCodes, Tensor]:
    """Random codes, and the weight that they stand for.  # [num_out, num_in]"""
    if kind == "int8":
        codes = torch.randint(-128, 128, (num_out, num_in), dtype=torch.int8)
        scales = torch.rand(num_out, 1) / 100
        return WeightCodes(codes=codes, scales=scales, table=None), codes * scales
    table = torch.randn(16)
    indices = torch.randint(0, 16, (num_out, num_in), dtype=torch.uint8)
    codes = indices[:, ::2] << 4 | indices[:, 1::2]
    scales = torch.rand(num_out, num_in // GROUP)
    weight = table[indices.int()] * scales.repeat_interleave(GROUP, dim=1)
    return WeightCodes(codes=codes, scales=scales, table=table), weight


def make_layer(
    kind: str, num_out: int, num_in: int, *, bias: bool = True
) -> tuple[CodedLinear, Tensor, Tensor]:
    """A layer, its weight and its bias."""
    linear = nn.Linear(num_in, num_out, bias=bias)
    codes, weight = make_codes(kind, num_out, num_in)
    offset = linear.bias.detach() if bias else torch.zeros(num_out)
    return CodedLinear(linear, codes), weight, offset


@of_codes
@of_dtypes
@pytest.mark.parametrize(("num_in", "num_out"), [(128, 200), (64, 1), (1024, 16), (14_336, 130)])
def test_products_are_exact_but_for_their_rounding(
    num_in: int, num_out: int, dtype: torch.dtype, kind: str
) -> None:
    """Every height of tiles, widths with a rest, and a weight too large to be fetched ahead."""
    torch.manual_seed(0)
    layer, weight, bias = make_layer(kind, num_out, num_in)
    inputs = torch.randn(1, max(NUM_TOKENS), num_in, dtype=dtype)
    expected = nn.functional.linear(inputs.double(), weight.double(), bias.double())
    relative, absolute = PRECISIONS[dtype]
    for num_tokens in NUM_TOKENS:
        with torch.inference_mode():
            products = layer(inputs[:, :num_tokens])
        assert (products.dtype, products.shape) == (dtype, (1, num_tokens, num_out))
        torch.testing.assert_close(
            products.double(), expected[:, :num_tokens], rtol=relative, atol=absolute
        )


@of_codes
@of_dtypes
@pytest.mark.parametrize("bias", [True, False])
def test_a_row_is_the_same_in_any_batch(bias: bool, dtype: torch.dtype, kind: str) -> None:
    torch.manual_seed(0)
    layer, _, _ = make_layer(kind, 1000, 512, bias=bias)
    inputs = torch.randn(50, 512, dtype=dtype)
    with torch.inference_mode():
        alone = torch.cat([layer(row[None]) for row in inputs])
        for num_rows in (2, 7, 8, 9, 13, 30, 50):
            assert torch.equal(layer(inputs[:num_rows]), alone[:num_rows])


@of_codes
def test_no_rows_and_strided_rows(kind: str) -> None:
    layer, _, _ = make_layer(kind, 48, 64)
    inputs = torch.randn(6, 128)
    with torch.inference_mode():
        assert layer(inputs[:0, :64]).shape == (0, 48)
        assert torch.equal(layer(inputs[::2, 64:]), layer(inputs[::2, 64:].contiguous()))


@of_codes
def test_a_layer_can_be_compiled_around(kind: str) -> None:
    layer, _, _ = make_layer(kind, 48, 64)
    inputs = torch.randn(6, 64)
    with torch.no_grad():
        program = torch.export.export(layer, (inputs,))
        assert torch.equal(program.module()(inputs), layer(inputs))


def test_a_plain_layer_has_no_codes() -> None:
    assert find_codes(nn.Linear(4, 4)) is None
