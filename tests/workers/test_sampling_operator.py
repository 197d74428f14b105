"""The sampler's own operator, against torch's and the sampler without it."""

import pytest
import torch
from torch import Tensor

from tests.workers.logits import make_row
from workers.cpu import native
from workers.grammar import Grammar
from workers.sampling import NO_TOKEN, gumbel_noise, sample, sample_with_confidence


def draw_mask(vocab_size: int) -> Tensor:
    """A random mask that allows about two tokens in three; some bytes of it allow all or none.

    # [ceil(vocab / 8)] uint8
    """
    bits = torch.randint(256, (-(-vocab_size // 8),), dtype=torch.uint8)
    bits |= torch.randint(256, bits.shape, dtype=torch.uint8)
    bits[torch.rand(bits.shape) < 0.2] = 0
    bits[torch.rand(bits.shape) < 0.2] = 255
    bits[0] |= 1
    return bits


@pytest.mark.skipif(not native.load_operators(), reason="no C++ compiler on this machine")
class TestOperator:
    """Against torch's own operators."""

    def highest(self, scores: Tensor) -> tuple[list[int], list[float]]:
        """The index that the operator chooses in each greedy row, and its share of the softmax."""
        none = [0] * len(scores)
        chosen: tuple[list[int], list[float]] = torch.ops.tandem.sample(
            scores, [0.0] * len(scores), none, none, [None] * len(scores), 0.2
        )
        return chosen

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 50), (4, 256), (40, 4096), (2, 100_003)])
    def test_index_and_share_are_those_of_torch(
        self, shape: tuple[int, int], dtype: torch.dtype
    ) -> None:
        torch.manual_seed(0)
        scores = (3 * torch.randn(shape)).to(dtype)  # in bf16 many are equal
        indices, shares = self.highest(scores)
        assert indices == scores.argmax(-1).tolist()
        expected = scores.float().softmax(-1).amax(-1)
        torch.testing.assert_close(torch.tensor(shares), expected, rtol=1e-5, atol=0)

    @pytest.mark.parametrize("position", [0, 1, 255, 256, 300, 511, 599])
    def test_wherever_it_is(self, position: int) -> None:
        scores = torch.full((1, 600), -float("inf"))
        scores[0, position] = -1e30
        assert self.highest(scores) == ([position], [1.0])

    def test_the_first_of_equals(self) -> None:
        scores = torch.zeros(2, 1000)
        scores[1, [300, 301, 999]] = 2.0
        assert self.highest(scores)[0] == [0, 300]

    def test_rows_that_lie_apart_are_read_right(self) -> None:
        scores = torch.randn(60, 9).T
        assert self.highest(scores)[0] == scores.argmax(-1).tolist()

    def test_no_token_is_decided_where_no_score_is_a_number(self) -> None:
        assert self.highest(torch.full((1, 600), float("nan")))[0] == [NO_TOKEN]

    @pytest.mark.parametrize("vocab_size", [1, 15, 16, 255, 257, 100_003])
    def test_noise_is_the_same_bit_by_bit(self, vocab_size: int) -> None:
        """Added to what cancels it out, it leaves equals, of which the first is taken."""
        seeds, positions = [42, 2**62, 7, 0, -1, -(2**63)], [10, 11, 4000, 0, 1, 2]
        noise = gumbel_noise(seeds, positions, vocab_size=vocab_size)
        ones = [1.0] * len(seeds)
        tokens, confidences = torch.ops.tandem.sample(
            -noise, ones, seeds, positions, [None] * len(seeds), 0.0
        )
        assert tokens == [0] * len(seeds)
        assert confidences == pytest.approx([1 / vocab_size] * len(seeds), rel=1e-5)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("vocab_size", [1, 15, 16, 255, 257, 4096, 100_003])
    @pytest.mark.parametrize(
        "params",
        [{}, {"temperature": 0.7}, {"temperature": 0.01}, {"top_k": 8, "temperature": 1.5},
          {"logit_bias": ((0, 2.0),)}],
        ids=str,
    )  # fmt: skip
    @pytest.mark.parametrize("grammar", [None, Grammar.regex("a")], ids=["", "grammar"])
    def test_sampled_rows_are_those_without_it(
        self,
        params: dict[str, object],
        grammar: Grammar | None,
        vocab_size: int,
        dtype: torch.dtype,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A machine without a compiler samples without the operator, and writes the same texts."""
        torch.manual_seed(0)
        count = min(400, max(4, 100_000 // vocab_size))
        logits = (0.3 * torch.randn(count, vocab_size)).to(dtype)  # so flat that the noise decides
        seeds = [0, -1, 2**62, 2**63 - 1]
        rows = [
            make_row(
                seed=seeds[i % 4],
                position=i,
                grammar=grammar,
                allowed=draw_mask(vocab_size) if grammar else None,
                **params,
            )
            for i in range(count)
        ]
        rows[1] = make_row(temperature=0.0)
        rows[2] = make_row(temperature=0.0, grammar=grammar, allowed=rows[2].allowed)
        tokens = sample(logits, rows)
        found, confidences = sample_with_confidence(logits, rows)
        monkeypatch.setattr(native, "load_operators", lambda: False)
        assert tokens == found == sample(logits, rows)
        expected = sample_with_confidence(logits, rows)
        assert found == expected[0]
        assert confidences == pytest.approx(expected[1], rel=1e-4)
