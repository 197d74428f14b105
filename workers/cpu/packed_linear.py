"""Linear layers whose weights are laid out once for the CPU's matrix kernels.

On a CPU, `torch.nn.functional.linear` rearranges the whole weight matrix in every call of a few
tokens before it multiplies, which costs as much as the product itself, or more. Here that is done
at load, in place of the original weights: for our own kernel where the CPU has its instructions,
for oneDNN's bf16 one elsewhere. Quantized layers that we have a kernel for go to `coded_linear`.
"""

import operator
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from workers.cpu import huge_pages, native
from workers.cpu.coded_linear import CodedLinear, find_codes, is_quantized
from workers.cpu.weight_facts import WeightFacts

# The layout is chosen for products of about this many tokens: a verification's.
TYPICAL_NUM_TOKENS = 8
# State spaces read the weight or the bias of layers of this name themselves.
WEIGHTS_READ = "dt_proj"
# Of torchao and bitsandbytes. Others, like routers of experts, may do more than multiply.
QUANTIZED_CLASSES = ("Linear", "Linear4bit")


class StreamedLinear(nn.Module):
    """A linear layer for inference.  # [..., in_features] -> [..., out_features]

    The operator of `csrc/streamed_linear.cpp`. A token's result is the same in any batch, bit for
    bit, which neither oneDNN nor `torch.nn.functional.linear` promises.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = WeightFacts.of(linear.weight)
        weight = huge_pages.moved(torch.ops.tandem.stream_weight(linear.weight))
        self.register_buffer("_weight", weight, persistent=False)
        bias = None if linear.bias is None else linear.bias.detach().float()
        self.register_buffer("_bias", bias, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = torch.ops.tandem.streamed_linear(
            inputs, self._weight, self._bias, self.out_features
        )
        return output


class PackedLinear(nn.Module):
    """A linear layer for inference, by oneDNN.  # [..., in_features] -> [..., out_features]

    The products are those of `torch.nn.functional.linear`, bit for bit.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = WeightFacts.of(linear.weight)
        self.bias = linear.bias
        # opaque to all other operators, and neither parameter nor buffer: it cannot be moved
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight, TYPICAL_NUM_TOKENS)
        self._packed: Tensor | None = packed
        if native.load_operators():  # the same product, as an operator that can be compiled around
            self._packed = None
            handle = torch.ops.tandem.keep_packed(packed)
            weakref.finalize(self, torch.ops.tandem.drop_packed, handle)
            # a matrix: the compiler would write the values of small vectors into the code
            self.register_buffer("_handle", torch.tensor([[handle]]), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor
        if self._packed is None:
            output = torch.ops.tandem.packed_linear(
                inputs, self._handle, self.bias, self.out_features
            )
        else:
            output = torch.ops.mkldnn._linear_pointwise(
                inputs, self._packed, self.bias, "none", [], ""
            )
        return output


@torch.no_grad()
def pack_linears(module: nn.Module) -> int:
    """Replace the linear layers of a model on a CPU; returns how many.

    Only plain `nn.Linear` layers, and those quantized in ways that we know: others may read their
    weights. Where this build of torch or this CPU has no such kernels, none.
    """
    num_packed = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if name != WEIGHTS_READ and (packed := _pack(child)) is not None:
                setattr(parent, name, packed)
                num_packed += 1
    return num_packed


def _pack(linear: nn.Module) -> nn.Module | None:
    """The layer laid out anew; None where it is to stay as it is."""
    if not isinstance(linear, nn.Linear) or linear.weight.device.type != "cpu":
        return None
    if is_quantized(linear) and type(linear).__name__ in QUANTIZED_CLASSES:
        codes = find_codes(linear) if has_streams(torch.float32) else None
        return None if codes is None else CodedLinear(linear, codes)
    if type(linear) is not nn.Linear or is_quantized(linear):
        return None
    dtype = linear.weight.dtype
    fits = dtype == torch.float32 or linear.in_features % 2 == 0  # bf16 inputs are taken in pairs
    if fits and has_streams(dtype):
        return StreamedLinear(linear)
    return PackedLinear(linear) if dtype == torch.bfloat16 and has_kernels() else None


def join_products(program: ExportedProgram) -> None:
    """Let streamed layers of one input, as those of queries and keys, be one operator.

    Their results are the same. Inputs are laid out once, and threads meet once, where each layer
    alone does both.
    """
    graph = program.graph
    by_inputs: dict[Node, list[Node]] = {}
    streamed = torch.ops.tandem.streamed_linear.default
    for product in graph.find_nodes(op="call_function", target=streamed):
        by_inputs.setdefault(product.args[0], []).append(product)
    for inputs, products in by_inputs.items():
        if len(products) > 1:
            _join(graph, inputs, products)
    graph.lint()
    program.graph_module.recompile()


def _join(graph: Graph, inputs: Node, products: Sequence[Node]) -> None:
    _, weights, biases, out_features = zip(*(product.args for product in products), strict=True)
    with graph.inserting_before(products[0]):
        joined = graph.call_function(
            torch.ops.tandem.streamed_linears.default,
            (inputs, list(weights), list(biases), list(out_features)),
        )
        parts = [
            graph.call_function(operator.getitem, (joined, index)) for index in range(len(products))
        ]
    joined.meta["val"] = [product.meta["val"] for product in products]
    for product, part in zip(products, parts, strict=True):
        part.meta["val"] = product.meta["val"]
        product.replace_all_uses_with(part)
        graph.erase_node(product)


def has_streams(dtype: torch.dtype) -> bool:
    """Whether this machine can have our own kernel for such weights, and gains by it."""
    return native.load_operators() and bool(torch.ops.tandem.streams_linear(dtype))


def has_kernels() -> bool:
    """Whether this build of torch and this CPU can multiply by weights packed for oneDNN."""
    return bool(
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
