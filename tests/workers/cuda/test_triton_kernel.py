"""The Triton attention against an explicit softmax: on CUDA, or by Triton's interpreter.

The interpreter (see tests/conftest.py) runs where Triton is installed and no CUDA device is.
"""

import os
from typing import Any

import numpy as np
import pytest
import torch
from numpy.lib import NumpyVersion
from torch import Tensor

from tests.workers.cpu.test_kernel import ALL, BLOCK_SIZE, RULES, SEQUENCES, Case
from workers.cuda.triton_kernel import TritonKernel
from workers.paged_kernel import LayerSpec, ScoreRule, VarlenBatch

DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"]
# what a device can multiply: the interpreter misreads bf16
DTYPES = [
    pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ("cpu", torch.float32),
    ("cpu", torch.float16),
]


class OnDevice:
    """The kernel on a device, for tensors of the CPU."""

    def __init__(self, kernel: TritonKernel, device: str) -> None:
        self._kernel = kernel
        self._device = device

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: VarlenBatch, rule: ScoreRule
    ) -> Tensor:
        def move(tensor: Any) -> Any:
            return tensor.to(self._device) if isinstance(tensor, Tensor) else tensor

        there = VarlenBatch(**{name: move(getattr(batch, name)) for name in batch.__slots__})
        moved_rule = ScoreRule(**{name: move(getattr(rule, name)) for name in rule.__slots__})
        return self._kernel(move(query), move(keys), move(values), there, moved_rule).cpu()


def find(device: str, dtype: torch.dtype, key_dim: int, value_dim: int) -> OnDevice:
    if device == "cpu":
        pytest.importorskip("triton")
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("there is a CUDA device, for which Triton compiles")
        if NumpyVersion(np.__version__) >= "2.4.0":
            pytest.skip("Triton's interpreter makes numbers of arrays, as NumPy 2.4 does not")
    spec = LayerSpec(
        layer=0, num_heads=6, num_kv_heads=3, key_dim=key_dim, value_dim=value_dim, is_plain=True
    )
    kernel = TritonKernel.find(
        spec, block_size=BLOCK_SIZE, dtype=dtype, device=torch.device(device)
    )
    assert kernel is not None
    return OnDevice(kernel, device)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(
    ("device", "num_kv_heads", "dims"),
    [
        # each shape is compiled, for seconds
        pytest.param("cuda", 3, (64, 64), marks=pytest.mark.gpu),
        *(("cpu", num_kv_heads, (64, 64)) for num_kv_heads in (6, 3, 1)),
        ("cpu", 3, (8, 8)),
        ("cpu", 3, (40, 24)),
    ],
)
def test_output_is_that_of_an_explicit_softmax(
    device: str, num_kv_heads: int, dims: tuple[int, int], rule: ScoreRule
) -> None:
    kernel: Any = find(device, torch.float32, *dims)
    case = Case(6, num_kv_heads, *dims, torch.float32)
    for output, expected in zip(case.run(kernel, rule, ALL), case.expected(rule), strict=True):
        torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("device", "dtype"), [DTYPES[1], DTYPES[3]])
def test_in_16_bits_only_weights_and_outputs_are_rounded(
    device: str, dtype: torch.dtype, rule: ScoreRule
) -> None:
    kernel: Any = find(device, dtype, 64, 64)
    case = Case(6, 3, 64, 64, dtype)
    precision = 2 * torch.finfo(dtype).eps
    magnitudes = case.expected(rule, of_magnitudes=True)
    outputs = case.run(kernel, rule, ALL)
    for output, right, magnitude in zip(outputs, case.expected(rule), magnitudes, strict=True):
        assert ((output.double() - right).abs() <= precision * magnitude + 1e-5).all()


@pytest.mark.parametrize("rule", [RULES["plain"], RULES["window of many chunks"]])
@pytest.mark.parametrize(("device", "dtype"), DTYPES[:2])
def test_a_query_gets_the_same_bits_in_every_batch(
    device: str, dtype: torch.dtype, rule: ScoreRule
) -> None:
    """Alone, and among the drafts of its sequence and other sequences.

    The interpreter multiplies by NumPy, which does not promise that.
    """
    kernel: Any = find(device, dtype, 32, 32)
    case = Case(6, 3, 32, 32, dtype)
    starts = torch.tensor([0] + [new for new, _ in SEQUENCES]).cumsum(0).tolist()
    for member, together in enumerate(case.run(kernel, rule, ALL)):
        num_new, context_len = SEQUENCES[member]
        for index in range(0, num_new, 3):
            alone = kernel(
                case.query[starts[member] + index][None],
                case.keys,
                case.values,
                VarlenBatch(
                    query_starts=torch.tensor([0, 1], dtype=torch.int32),
                    context_lens=torch.tensor([context_len - num_new + index + 1]).int(),
                    block_table=torch.tensor([case.tables[member]], dtype=torch.int32),
                    max_query_len=1,
                    max_context_len=context_len,
                ),
                rule,
            )
            assert torch.equal(alone[0], together[index])


@pytest.mark.parametrize("device", DEVICES)
def test_sequences_without_tokens_are_passed_over(device: str) -> None:
    """As a graph has them, behind those that fill it."""
    kernel: Any = find(device, torch.float32, 32, 32)
    case = Case(6, 3, 32, 32, torch.float32)
    new, context_len = SEQUENCES[2]
    first = sum(new for new, _ in SEQUENCES[:2])
    outputs = []
    for num_empty in (0, 3):
        batch = VarlenBatch(
            query_starts=torch.tensor([0, *[new] * (1 + num_empty)], dtype=torch.int32),
            context_lens=torch.tensor([context_len, *[1] * num_empty], dtype=torch.int32),
            block_table=torch.tensor([case.tables[2]] * (1 + num_empty), dtype=torch.int32),
            max_query_len=64,
            max_context_len=200,
        )
        query = case.query[first : first + new]
        outputs.append(kernel(query, case.keys, case.values, batch, RULES["plain"]))
    assert torch.equal(*outputs)
