"""The compiled CPU attention against an explicit softmax, and finding it."""

from functools import cache

import pytest
import torch
from torch import Tensor

from workers.cpu import kernel as cpu_kernel
from workers.cpu.kernel import CpuKernel
from workers.paged_kernel import LayerSpec, ScoreRule, VarlenBatch

BLOCK_SIZE = 4
NUM_BLOCKS = 200
# (new tokens, context): single tokens, drafts, a prefill of several tiles, contexts of many chunks
SEQUENCES = ((1, 1), (1, 130), (5, 70), (5, 5), (40, 100), (3, 64), (2, 65), (4, 90), (2, 40))


def make_spec(num_heads: int, num_kv_heads: int, key_dim: int, value_dim: int) -> LayerSpec:
    return LayerSpec(
        layer=0,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        is_plain=True,
    )


def find(
    num_heads: int, num_kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> CpuKernel:
    spec = make_spec(num_heads, num_kv_heads, key_dim, value_dim)
    kernel = CpuKernel.find(spec, block_size=BLOCK_SIZE, dtype=dtype)
    if kernel is None:
        pytest.skip("no C++ compiler here")
    return kernel


class Case:
    """Random sequences in a scattered cache, NaN wherever nothing was written."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> None:
        torch.manual_seed(0)
        num_slots = NUM_BLOCKS * BLOCK_SIZE
        self.keys = torch.full((num_slots, num_kv_heads, key_dim), float("nan"), dtype=dtype)
        self.values = torch.full((num_slots, num_kv_heads, value_dim), float("nan"), dtype=dtype)
        num_new = sum(new for new, _ in SEQUENCES)
        # as the model gives it: heads before tokens in memory
        self.query = torch.randn(num_heads, num_new, key_dim).to(dtype).transpose(0, 1)
        free = torch.randperm(NUM_BLOCKS).tolist()
        self.tables, self.slots = [], []
        for _, context_len in SEQUENCES:
            table = [free.pop() for _ in range(-(-context_len // BLOCK_SIZE))]
            slots = [
                table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(context_len)
            ]
            self.keys[slots] = torch.randn(context_len, num_kv_heads, key_dim).to(dtype)
            self.values[slots] = torch.randn(context_len, num_kv_heads, value_dim).to(dtype)
            self.tables.append(table)
            self.slots.append(slots)

    def run(self, kernel: CpuKernel, rule: ScoreRule, members: list[int]) -> list[Tensor]:
        """The members' outputs, as a batch."""
        starts = [0]
        for new, _ in SEQUENCES:
            starts.append(starts[-1] + new)
        lens = [SEQUENCES[m][0] for m in members]
        query = torch.cat([self.query[starts[m] : starts[m + 1]] for m in members])
        tables = [self.tables[m] + [0] * (40 - len(self.tables[m])) for m in members]
        batch = VarlenBatch(
            query_starts=torch.tensor([0, *lens]).cumsum(0).to(torch.int32),
            context_lens=torch.tensor([SEQUENCES[m][1] for m in members], dtype=torch.int32),
            block_table=torch.tensor(tables, dtype=torch.int32),
            max_query_len=max(lens),
            max_context_len=max(SEQUENCES[m][1] for m in members),
        )
        return list(kernel(query, self.keys, self.values, batch, rule).split(lens))

    def expected(self, rule: ScoreRule, *, of_magnitudes: bool = False) -> list[Tensor]:
        """`of_magnitudes`: what the absolute values would give."""
        outputs, start = [], 0
        for (new, context_len), slots in zip(SEQUENCES, self.slots, strict=True):
            query = self.query[start : start + new].double()
            start += new
            heads_per_kv = query.shape[1] // self.keys.shape[1]
            keys = self.keys[slots].double().repeat_interleave(heads_per_kv, dim=1)
            values = self.values[slots].double().repeat_interleave(heads_per_kv, dim=1)
            scores = torch.einsum("nhd,chd->hnc", query, keys) * rule.scale
            if rule.softcap:
                scores = torch.tanh(scores / rule.softcap) * rule.softcap
            positions = torch.arange(context_len - new, context_len)[:, None]
            visible = torch.arange(context_len) <= positions
            if rule.window:
                visible &= torch.arange(context_len) > positions - rule.window
            scores = scores.masked_fill(~visible, float("-inf"))
            if rule.sinks is not None:
                sinks = rule.sinks.double()[:, None, None].expand(-1, new, 1)
                scores = torch.cat([scores, sinks], dim=-1)
            weights = scores.softmax(-1)[..., :context_len]
            values = values.abs() if of_magnitudes else values
            outputs.append(torch.einsum("hnc,chd->nhd", weights, values))
        return outputs


make_case = cache(Case)
"""The same case for all rules, which leave it as it is."""
RULES = {
    "plain": ScoreRule(scale=0.3),
    "window": ScoreRule(scale=0.3, window=7),
    "window of many chunks": ScoreRule(scale=0.3, window=90),
    "softcap": ScoreRule(scale=1.0, softcap=2.0),
    "sinks": ScoreRule(scale=0.3, sinks=torch.linspace(-2, 3, 6)),
    "sinks and window": ScoreRule(scale=0.3, window=3, sinks=torch.linspace(-2, 3, 6)),
}
ALL = list(range(len(SEQUENCES)))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("num_kv_heads", [6, 3, 1])
@pytest.mark.parametrize("dims", [(8, 8), (16, 16), (64, 64), (40, 24), (144, 144), (256, 256)])
def test_output_is_that_of_an_explicit_softmax(
    dims: tuple[int, int], num_kv_heads: int, rule: ScoreRule
) -> None:
    kernel = find(6, num_kv_heads, *dims, torch.float32)
    case = make_case(6, num_kv_heads, *dims, torch.float32)
    for output, expected in zip(case.run(kernel, rule, ALL), case.expected(rule), strict=True):
        torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("dims", [(8, 8), (32, 32), (64, 64), (41, 23), (144, 80), (256, 256)])
def test_in_bf16_only_weights_and_outputs_are_rounded(
    dims: tuple[int, int], rule: ScoreRule
) -> None:
    kernel = find(6, 3, *dims, torch.bfloat16)
    case = make_case(6, 3, *dims, torch.bfloat16)
    outputs, expected = case.run(kernel, rule, ALL), case.expected(rule)
    magnitudes = case.expected(rule, of_magnitudes=True)
    for output, right, magnitude in zip(outputs, expected, magnitudes, strict=True):
        assert ((output.double() - right).abs() <= 2**-7 * magnitude + 1e-5).all()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_gets_the_same_bits_in_every_batch(dtype: torch.dtype, num_threads: int) -> None:
    kernel = find(6, 3, 32, 32, dtype)
    case = make_case(6, 3, 32, 32, dtype)
    rule = RULES["plain"]
    before = torch.get_num_threads()
    together = case.run(kernel, rule, ALL)
    torch.set_num_threads(num_threads)
    try:
        alone = [case.run(kernel, rule, [member])[0] for member in ALL]
    finally:
        torch.set_num_threads(before)
    for one, among_others in zip(alone, together, strict=True):
        assert torch.equal(one, among_others)


@pytest.mark.parametrize("num_kv_heads", [6, 3, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_gets_the_same_bits_alone_as_among_drafts(
    dtype: torch.dtype, num_kv_heads: int
) -> None:
    """Few rows are treated in another way than many."""
    kernel = find(6, num_kv_heads, 32, 32, dtype)
    case = make_case(6, num_kv_heads, 32, 32, dtype)
    starts = torch.tensor([0] + [new for new, _ in SEQUENCES]).cumsum(0).tolist()
    for member, together in enumerate(case.run(kernel, RULES["plain"], ALL)):
        num_new, context_len = SEQUENCES[member]
        for index in range(num_new):
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
                RULES["plain"],
            )
            assert torch.equal(alone[0], together[index])


def test_what_it_cannot_do_is_left_to_the_gather_path() -> None:
    small, large = make_spec(2, 2, 8, 8), make_spec(2, 2, 512, 8)
    assert CpuKernel.find(small, block_size=4, dtype=torch.float16) is None
    assert CpuKernel.find(large, block_size=4, dtype=torch.float32) is None


def test_a_disagreeing_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    find(2, 2, 8, 8, torch.float32)
    monkeypatch.setattr(cpu_kernel, "probe_error", lambda *_, **__: 1.0)
    assert CpuKernel.find(make_spec(2, 2, 8, 8), block_size=4, dtype=torch.float32) is None


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_it_is_tried_with_blocks_of_any_size(block_size: int) -> None:
    find(4, 2, 32, 32, torch.float32)
    spec = make_spec(4, 2, 32, 32)
    assert CpuKernel.find(spec, block_size=block_size, dtype=torch.float32) is not None
