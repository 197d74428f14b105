"""The sampler's noise, bit by bit."""

import pytest
import torch
from torch import Tensor

from tests.goodness_of_fit import chisquare_pvalue
from tests.workers.logits import VOCAB_SIZE
from workers.sampling import gumbel_noise, row_keys, uniform_noise


def split_mix_64(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
    return state ^ (state >> 31)


def mix_32(bits: int) -> int:
    bits ^= bits >> 16
    bits = bits * 0x7FEB352D % 2**32
    bits ^= bits >> 15
    bits = bits * 0x846CA68B % 2**32
    return bits ^ (bits >> 16)


def noise_bits(keys: Tensor, vocab_size: int) -> Tensor:
    return (uniform_noise(keys, vocab_size) * 2.0**32 - 0.5).long()


class TestNoise:
    @pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1])
    @pytest.mark.parametrize("position", [0, 5, 100_000])
    def test_bits_equal_the_definition_in_exact_integers(self, seed: int, position: int) -> None:
        state = split_mix_64(split_mix_64(seed) ^ position)
        low, high = state % 2**32, state >> 32
        expected = [mix_32(mix_32(token ^ low) ^ high) for token in range(300)]
        bits = noise_bits(row_keys([5, seed], [1, position]), 300)
        assert bits[1].tolist() == expected

    def test_bits_never_change(self) -> None:
        """A golden value: changing the noise changes every seeded text ever served."""
        bits = noise_bits(row_keys([42, 42, 7], [10, 11, 10]), 4)
        assert bits.tolist() == [
            [2135573677, 500801306, 679325578, 1063615395],
            [2650998304, 733577796, 4133403003, 1594773800],
            [3774685566, 3848260233, 3861313697, 369891953],
        ]

    @pytest.mark.gpu
    def test_bits_are_the_same_on_cuda(self) -> None:
        keys = row_keys([42, 2**62, 7], [10, 11, 4000])
        on_cuda = noise_bits(keys.cuda(), 100_000)
        assert torch.equal(noise_bits(keys, 100_000), on_cuda.cpu())

    def test_a_rows_noise_does_not_depend_on_its_batch(self) -> None:
        together = gumbel_noise([3, 4, 5], [1, 2, 3], vocab_size=VOCAB_SIZE)
        alone = gumbel_noise([4], [2], vocab_size=VOCAB_SIZE)
        assert torch.equal(together[1:2], alone)

    def test_a_token_keeps_its_noise_in_a_larger_vocabulary(self) -> None:
        small = gumbel_noise([3], [1], vocab_size=VOCAB_SIZE)
        large = gumbel_noise([3], [1], vocab_size=4 * VOCAB_SIZE)
        assert torch.equal(small, large[:, :VOCAB_SIZE])

    @pytest.mark.parametrize("varied", ["seed", "position", "token"])
    def test_noise_is_gumbel_along_each_key(self, varied: str) -> None:
        count = 20_000
        if varied == "token":
            noise = gumbel_noise([9], [9], vocab_size=count)[0]
        elif varied == "seed":
            noise = gumbel_noise(range(count), [9] * count, vocab_size=3)[:, 1]
        else:
            noise = gumbel_noise([9] * count, range(count), vocab_size=3)[:, 1]
        # their distribution function makes them uniform
        counts = torch.histc((-(-noise).exp()).exp(), bins=20, min=0.0, max=1.0)
        assert chisquare_pvalue(counts, [count / 20] * 20) > 1e-3

    def test_neighbouring_keys_are_uncorrelated(self) -> None:
        count = 50_000
        noise = gumbel_noise([1] * count, range(count), vocab_size=2).double()
        other_seed = gumbel_noise([2] * count, range(count), vocab_size=2).double()
        pairs = [
            (noise[:, 0], noise[:, 1]),
            (noise[:-1, 0], noise[1:, 0]),
            (noise[:, 0], other_seed[:, 0]),
        ]
        for first, second in pairs:
            correlation = torch.corrcoef(torch.stack([first, second]))[0, 1]
            assert abs(correlation) < 4 / count**0.5
