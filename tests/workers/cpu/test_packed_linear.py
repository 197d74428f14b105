"""Packed linear layers against the ones they replace."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from workers.cpu import packed_linear
from workers.cpu.packed_linear import PackedLinear, StreamedLinear, pack_linears

needs_kernels = pytest.mark.skipif(
    not packed_linear.has_kernels(), reason="no packed bf16 products on this CPU"
)
# relative: half a unit in bf16's last place, or what fp32 sums lose; absolute: what those lose
PRECISIONS = {torch.bfloat16: (2**-8, 1e-4), torch.float32: (1e-5, 1e-4)}
NUM_TOKENS = (1, 2, 3, 5, 8, 11, 12, 13, 17, 25, 64)
of_streamed_dtypes = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=pytest.mark.skipif(
            not packed_linear.has_streams(dtype), reason="this CPU has no use for such streams"
        ))
        for dtype in PRECISIONS
    ],
)  # fmt: skip


@pytest.fixture
def two_threads() -> Iterator[None]:
    """So that what threads share is not all of one's."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(num_threads)


@needs_kernels
@pytest.mark.parametrize("num_tokens", [1, 5, 64])
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_those_of_the_plain_layer(num_tokens: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 200, bias=bias, dtype=torch.bfloat16)
    inputs = torch.randn(1, num_tokens, 96, dtype=torch.bfloat16)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear)(inputs), linear(inputs))


@of_streamed_dtypes
@pytest.mark.parametrize(
    ("in_features", "out_features"), [(96, 200), (2, 1), (1024, 16), (258, 1000), (14_000, 130)]
)
@pytest.mark.usefixtures("two_threads")
def test_streamed_products_are_exact_but_for_their_rounding(
    in_features: int, out_features: int, dtype: torch.dtype
) -> None:
    """Every height of tiles, widths with a rest, and a weight too large to be fetched ahead."""
    torch.manual_seed(0)
    linear = nn.Linear(in_features, out_features, dtype=dtype)
    inputs = torch.randn(1, max(NUM_TOKENS), in_features, dtype=dtype)
    expected = nn.functional.linear(inputs.double(), linear.weight.double(), linear.bias.double())
    relative, absolute = PRECISIONS[dtype]
    streamed = StreamedLinear(linear)
    for num_tokens in NUM_TOKENS:
        with torch.inference_mode():
            products = streamed(inputs[:, :num_tokens])
        assert products.dtype == dtype
        torch.testing.assert_close(
            products.double(), expected[:, :num_tokens], rtol=relative, atol=absolute
        )


@of_streamed_dtypes
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.usefixtures("two_threads")
def test_a_streamed_row_is_the_same_in_any_batch(bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(512, 1000, bias=bias, dtype=dtype)
    inputs = torch.randn(50, 512, dtype=dtype)
    with torch.inference_mode():
        streamed = StreamedLinear(linear)
        alone = torch.cat([streamed(row[None]) for row in inputs])
        for num_rows in (2, 7, 8, 9, 13, 30, 50):
            assert torch.equal(streamed(inputs[:num_rows]), alone[:num_rows])


@of_streamed_dtypes
def test_no_rows_and_strided_rows(dtype: torch.dtype) -> None:
    linear = nn.Linear(64, 48, dtype=dtype)
    streamed = StreamedLinear(linear)
    inputs = torch.randn(6, 128, dtype=dtype)
    with torch.inference_mode():
        assert streamed(inputs[:0, :64]).shape == (0, 48)
        assert torch.equal(streamed(inputs[::2, 64:]), streamed(inputs[::2, 64:].contiguous()))


class OfOneInput(nn.Module):
    """Three layers of one input, with and without biases, and one of what comes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(512, 1000, bias=False)
        self.second = nn.Linear(512, 40)
        self.third = nn.Linear(512, 7)
        self.last = nn.Linear(40, 16)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.first(inputs), self.last(self.second(inputs)), self.third(inputs)


@of_streamed_dtypes
@pytest.mark.parametrize("num_rows", [1, 5, 13, 40])
@pytest.mark.usefixtures("two_threads")
def test_joined_products_are_the_same_bits(num_rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = OfOneInput().to(dtype)
    assert pack_linears(module) == 4
    inputs = torch.randn(num_rows, 512, dtype=dtype)
    with torch.no_grad():
        program = torch.export.export(module, (inputs,))
        packed_linear.join_products(program)
        for product, expected in zip(program.module()(inputs), module(inputs), strict=True):
            assert torch.equal(product, expected)
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(torch.ops.tandem.streamed_linears.default) == 1
    assert targets.count(torch.ops.tandem.streamed_linear.default) == 1


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("streams", [(), (torch.float32,), (torch.float32, torch.bfloat16)])
def test_only_plain_layers_are_packed_that_a_kernel_takes(
    has_kernels: bool, streams: tuple[torch.dtype, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Special(nn.Linear):
        pass

    monkeypatch.setattr(packed_linear, "has_kernels", lambda: has_kernels)
    monkeypatch.setattr(packed_linear, "has_streams", lambda dtype: dtype in streams)
    for kind in ("PackedLinear", "StreamedLinear"):
        monkeypatch.setattr(packed_linear, kind, lambda _, kind=kind: Packed(kind))
    half = {"dtype": torch.bfloat16}
    module = nn.Sequential(
        nn.Linear(8, 8, **half), nn.Linear(7, 8, **half), nn.Linear(7, 8),
        nn.Linear(8, 8, dtype=torch.float16), Special(8, 8),
    )  # fmt: skip
    pack_linears(module)
    packed = "PackedLinear" if has_kernels else "Linear"
    assert [getattr(layer, "kind", "Linear") for layer in module] == [
        "StreamedLinear" if torch.bfloat16 in streams else packed,
        packed,  # inputs that are no pairs
        "StreamedLinear" if torch.float32 in streams else "Linear",
        "Linear",
        "Linear",
    ]


class Packed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind


def test_nothing_is_packed_where_torch_lacks_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "has_kernels", lambda: False)
    monkeypatch.setattr(packed_linear, "has_streams", lambda _: False)
    module = nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16))
    assert pack_linears(module) == 0
    assert type(module[0]) is nn.Linear


def test_without_the_operators_nothing_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear.native, "load_operators", lambda: False)
    assert not packed_linear.has_streams(torch.float32)


@of_streamed_dtypes
def test_a_packed_layer_still_says_what_its_weight_was(dtype: torch.dtype) -> None:
    """Some models ask, to convert their inputs; what would multiply by it fails."""
    module = nn.Sequential(nn.Linear(6, 4, dtype=dtype))
    assert pack_linears(module) == 1
    weight = module[0].weight
    assert (weight.shape, weight.dtype, weight.device.type) == ((4, 6), dtype, "cpu")
    with pytest.raises(TypeError):
        nn.functional.linear(torch.ones(1, 6, dtype=dtype), weight)
