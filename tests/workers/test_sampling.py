"""The sampler: its noise bit by bit, its processors against transformers', its law by
chi-square."""

import dataclasses
import itertools

import pytest
import torch
from scipy.stats import chisquare, kstest
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from workers.cpu import native
from workers.grammar import Grammar
from workers.sampling import (
    NO_TOKEN,
    SamplingRow,
    gumbel_noise,
    perturbed_scores,
    process_logits,
    row_keys,
    sample,
    sample_with_confidence,
    uniform_noise,
)
from workers.types import SamplingParams

VOCAB_SIZE = 50


def make_row(seed: int = 0, position: int = 0, **params: object) -> SamplingRow:
    return SamplingRow(params=SamplingParams(**params), seed=seed, position=position)


def make_logits(num_rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2


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
        assert kstest(noise.numpy(), "gumbel_r").pvalue > 1e-3

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


class TestProcessors:
    def processed(self, **params: object) -> torch.Tensor:
        return process_logits(make_logits(3), [make_row(**params)] * 3)

    def test_temperature(self) -> None:
        expected = TemperatureLogitsWarper(0.7)(None, make_logits(3))
        torch.testing.assert_close(self.processed(temperature=0.7), expected)

    @pytest.mark.parametrize("top_k", [1, 5, 49, 50, 500])
    def test_top_k(self, top_k: int) -> None:
        expected = TopKLogitsWarper(top_k)(None, make_logits(3))
        assert torch.equal(self.processed(top_k=top_k), expected)

    @pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
    def test_top_p(self, top_p: float) -> None:
        expected = TopPLogitsWarper(top_p)(None, make_logits(3))
        assert torch.equal(self.processed(top_p=top_p), expected)

    @pytest.mark.parametrize("min_p", [0.01, 0.1, 0.9, 1.0])
    def test_min_p(self, min_p: float) -> None:
        expected = MinPLogitsWarper(min_p)(None, make_logits(3))
        assert torch.equal(self.processed(min_p=min_p), expected)

    def test_truncations_follow_one_another(self) -> None:
        logits = make_logits(3)
        expected = TemperatureLogitsWarper(1.3)(None, logits)
        expected = TopKLogitsWarper(20)(None, expected)
        expected = TopPLogitsWarper(0.8)(None, expected)
        expected = MinPLogitsWarper(0.1)(None, expected)
        processed = self.processed(temperature=1.3, top_k=20, top_p=0.8, min_p=0.1)
        torch.testing.assert_close(processed, expected)

    def test_repetition_penalty(self) -> None:
        history = [3, 3, 7, 40]
        row = SamplingRow(
            params=SamplingParams(repetition_penalty=1.7, temperature=0.0),
            seed=0,
            position=4,
            history=history,
            prompt_len=2,
        )
        expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([history]), make_logits())
        torch.testing.assert_close(process_logits(make_logits(), [row]), expected)

    def test_presence_and_frequency_count_the_output_only(self) -> None:
        row = SamplingRow(
            params=SamplingParams(presence_penalty=0.5, frequency_penalty=0.25),
            seed=0,
            position=6,
            history=[9, 9, 3, 3, 3, 7],
            prompt_len=2,
        )
        expected = make_logits()
        expected[0, 3] -= 0.5 + 3 * 0.25
        expected[0, 7] -= 0.5 + 0.25
        torch.testing.assert_close(process_logits(make_logits(), [row]), expected)

    def test_logit_bias_decides_and_ignores_ids_beyond_the_vocabulary(self) -> None:
        row = make_row(temperature=0.0, logit_bias=((11, 100.0), (VOCAB_SIZE + 5, 100.0)))
        assert sample(make_logits(), [row]) == [11]

    @pytest.mark.parametrize("output_len", [0, 1, 3, 4, 9])
    def test_no_token_ends_the_text_too_soon(self, output_len: int) -> None:
        params = SamplingParams(min_tokens=4, stop_token_ids=(2, 30, VOCAB_SIZE + 5))
        row = SamplingRow(params=params, seed=0, position=7 + output_len, prompt_len=7)
        processed = process_logits(make_logits(), [row])
        expected = make_logits()
        if output_len < 4:
            expected[0, [2, 30]] = -float("inf")
        assert torch.equal(processed, expected)

    @pytest.mark.parametrize(
        ("output", "banned"),
        [
            ([], {9}),
            ([5], {9, 6}),
            ([1, 5], {9, 6, 7}),
            ([5, 1], {9}),
            ([3, 4, 5], {9, 6, 8}),
        ],
    )
    def test_a_bad_words_last_token_is_banned_behind_the_others(
        self, output: list[int], banned: set[int]
    ) -> None:
        """The prompt's end is no part of it."""
        bad_words = ((9,), (5, 6), (1, 5, 7), (3, 4, 5, 8), (VOCAB_SIZE + 1,))
        prompt = [3, 4, 5, 1]
        row = SamplingRow(
            params=SamplingParams(bad_words=bad_words),
            seed=0,
            position=4 + len(output),
            history=prompt + output,
            prompt_len=4,
        )
        processed = process_logits(make_logits(), [row])
        expected = make_logits()
        expected[0, list(banned)] = -float("inf")
        assert torch.equal(processed, expected)

    def test_history_is_asked_for_where_it_counts(self) -> None:
        assert not SamplingParams(bad_words=((4,), (5,))).needs_history
        assert SamplingParams(bad_words=((4,), (5, 6))).needs_history
        assert SamplingParams(presence_penalty=0.1).needs_history

    def test_a_mask_rules_out_what_its_bits_do_not_allow(self) -> None:
        """In some rows of a batch, and where the mask is of more tokens than there are logits."""
        allowed = torch.tensor([0b00010010] + [0] * 5 + [0xFF], dtype=torch.uint8)
        params = SamplingParams(grammar=Grammar.regex("a"), temperature=0.5)
        masked = SamplingRow(params=params, seed=0, position=0, allowed=allowed)
        processed = process_logits(make_logits(3), [make_row(), masked, make_row()])
        assert torch.equal(processed[::2], make_logits(3)[::2])
        kept = processed[1].isfinite().nonzero()[:, 0].tolist()
        assert kept == [1, 4, 48, 49]
        torch.testing.assert_close(processed[1, kept], make_logits(3)[1, kept] / 0.5)
        assert torch.equal(process_logits(make_logits(3)[1:2], [masked])[0], processed[1])

    def test_a_mask_that_allows_nothing_decides_no_token(self) -> None:
        nothing = torch.zeros(7, dtype=torch.uint8)
        for temperature in (0.0, 1.0):
            params = SamplingParams(grammar=Grammar.regex("a"), temperature=temperature)
            row = SamplingRow(params=params, seed=0, position=0, allowed=nothing)
            assert sample(make_logits(), [row]) == [NO_TOKEN]

    def test_rows_of_different_parameters_do_not_touch_each_other(self) -> None:
        params = [
            {"temperature": 0.0},
            {"temperature": 0.7, "top_k": 5},
            {"temperature": 1.0, "top_p": 0.5},
            {"temperature": 0.0, "logit_bias": ((4, 3.0),)},
            {"temperature": 1.5, "min_p": 0.2},
            {"temperature": 1.0},
        ]
        logits = make_logits(len(params))
        rows = [make_row(seed=i, position=i, **p) for i, p in enumerate(params)]
        together = sample(logits, rows)
        alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
        assert together == alone
        processed = process_logits(logits, rows)
        for i, row in enumerate(rows):
            assert torch.equal(processed[i : i + 1], process_logits(logits[i : i + 1], [row]))

    def test_logits_given_are_left_as_they_were(self) -> None:
        logits = make_logits()
        sample(logits, [make_row(temperature=0.5, top_k=3, logit_bias=((1, 2.0),))])
        assert torch.equal(logits, make_logits())


@pytest.mark.skipif(not native.load_operators(), reason="no C++ compiler on this machine")
class TestOperator:
    """Against torch's own operators."""

    def highest(self, scores: Tensor) -> tuple[list[int], list[float]]:
        """Of greedy rows: the index, and its share of the softmax."""
        none = [0] * len(scores)
        chosen: tuple[list[int], list[float]] = torch.ops.tandem.sample(
            scores, [0.0] * len(scores), none, none, 0.2
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
        tokens, confidences = torch.ops.tandem.sample(-noise, ones, seeds, positions, 0.0)
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
    def test_sampled_rows_are_those_without_it(
        self,
        params: dict[str, object],
        vocab_size: int,
        dtype: torch.dtype,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Who has no compiler is to write the same texts."""
        torch.manual_seed(0)
        count = max(4, 100_000 // vocab_size) if vocab_size > 1 else 4
        logits = (0.3 * torch.randn(count, vocab_size)).to(dtype)  # so flat that the noise decides
        seeds = [0, -1, 2**62, 2**63 - 1]
        rows = [make_row(seed=seeds[i % 4], position=i, **params) for i in range(count)]
        rows[1] = make_row(temperature=0.0)
        tokens = sample(logits, rows)
        found, confidences = sample_with_confidence(logits, rows)
        monkeypatch.setattr(native, "load_operators", lambda: False)
        assert tokens == found == sample(logits, rows)
        expected = sample_with_confidence(logits, rows)
        assert found == expected[0]
        assert confidences == pytest.approx(expected[1], rel=1e-4)


class TestConfidence:
    def test_greedy_confidence_is_the_probability(self) -> None:
        tokens, confidences = sample_with_confidence(
            make_logits(2), [make_row(temperature=0.0)] * 2
        )
        assert tokens == sample(make_logits(2), [make_row(temperature=0.0)] * 2)
        probabilities = make_logits(2).softmax(-1)
        assert confidences == pytest.approx(
            [float(p[t]) for p, t in zip(probabilities, tokens, strict=True)]
        )

    def test_a_sampled_token_is_as_sure_as_law_and_noise_make_it(self) -> None:
        """A law of one token is certain; of two that are equal, the noise decides, near or far."""
        logits = torch.full((1, VOCAB_SIZE), -1e9)
        logits[0, 5] = 0.0
        assert sample_with_confidence(logits, [make_row()])[1] == [1.0]
        logits[0, 6] = 0.0
        rows = [make_row(position=i) for i in range(200)]
        tokens, confidences = sample_with_confidence(logits.expand(200, -1), rows)
        assert set(tokens) == {5, 6}
        assert 0.5 <= min(confidences) < 0.6
        assert 0.8 < max(confidences) < 0.9  # certain with the noise, even without

    def test_what_was_unlikely_is_less_sure_though_as_far_ahead(self) -> None:
        rows = [make_row(position=i) for i in range(200)]
        logits = make_logits(1).expand(200, -1)
        tokens, confidences = sample_with_confidence(logits, rows)
        before = logits.softmax(-1)[range(200), tokens]
        share = perturbed_scores(logits, rows).softmax(-1).amax(-1)
        for confidence, *bounds in zip(confidences, before.tolist(), share.tolist(), strict=True):
            assert min(bounds) <= confidence * (1 + 1e-6)
            assert confidence <= max(bounds) * (1 + 1e-6)
        by_share = share.argsort()
        likely = before[by_share].view(20, 10) > before[by_share].view(20, 10).median(1, True)[0]
        departures = (torch.tensor(confidences) / share)[by_share].view(20, 10)
        assert departures[likely].mean() > 1.1 * departures[~likely].mean()

    def test_rows_are_as_sure_as_alone(self) -> None:
        rows = [make_row(temperature=t, seed=i) for i, t in enumerate([0.0, 0.7, 0.0, 1.2])]
        together = sample_with_confidence(make_logits(4), rows)
        for i, row in enumerate(rows):
            tokens, confidences = sample_with_confidence(make_logits(4)[i : i + 1], [row])
            assert tokens == [together[0][i]]
            assert confidences == pytest.approx([together[1][i]])


class TestLaw:
    def test_greedy_takes_the_lowest_of_equal_maxima(self) -> None:
        logits = torch.zeros(1, VOCAB_SIZE)
        logits[0, [31, 12, 40]] = 5.0
        assert sample(logits, [make_row(temperature=0.0)]) == [12]
        assert sample(logits.to(torch.bfloat16), [make_row(temperature=0.0)]) == [12]

    def test_equal_logits_of_the_top_p_edge_go_to_the_lowest(self) -> None:
        processed = process_logits(torch.zeros(1, 4), [make_row(top_p=0.5)])
        assert processed[0].isfinite().tolist() == [True, True, False, False]

    def test_scores_are_the_processed_logits_plus_the_noise(self) -> None:
        row = make_row(seed=5, position=17, temperature=0.8, top_k=10)
        scores = process_logits(make_logits(), [row]) + gumbel_noise(
            [5], [17], vocab_size=VOCAB_SIZE
        )
        assert sample(make_logits(), [row]) == [int(scores.argmax())]

    @pytest.mark.parametrize(
        "params",
        [
            {"temperature": temperature, **truncation}
            for temperature, truncation in itertools.product(
                [0.6, 1.0, 1.5],
                [{}, {"top_k": 8}, {"top_p": 0.7}, {"min_p": 0.05},
                 {"top_k": 20, "top_p": 0.9, "min_p": 0.02}],
            )
        ]
        + [
            {"repetition_penalty": 1.5},
            {"presence_penalty": 1.0, "frequency_penalty": 0.5},
            {"logit_bias": ((3, 2.0), (9, -100.0))},
        ],
        ids=str,
    )  # fmt: skip
    def test_samples_follow_the_processed_law(self, params: dict[str, object]) -> None:
        """One seeded chi-square per combination: 20,000 positions of one sequence."""
        count = 20_000
        logits = make_logits(seed=3)
        rows = [
            SamplingRow(
                params=SamplingParams(**params),
                seed=11,
                position=position,
                history=[3, 3, 9],
                prompt_len=1,
            )
            for position in range(count)
        ]
        law = process_logits(logits, rows[:1]).double().softmax(-1)[0]
        observed = torch.zeros(VOCAB_SIZE, dtype=torch.double)
        for start in range(0, count, 2000):
            tokens = sample(logits.expand(2000, -1), rows[start : start + 2000])
            observed += torch.bincount(torch.tensor(tokens), minlength=VOCAB_SIZE)
        assert observed[law == 0].sum() == 0
        # tokens expected less than five times are pooled, as the test requires
        is_common = law * count >= 5
        pooled = torch.cat([law[is_common], law[~is_common].sum()[None]]) * count
        counts = torch.cat([observed[is_common], observed[~is_common].sum()[None]])
        kept = pooled > 0
        assert chisquare(counts[kept], pooled[kept]).pvalue > 1e-4


class TestCoupling:
    def test_agreement_of_two_laws_is_the_closed_form(self) -> None:
        """P[x = y] = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) (Daliri et al. 2024)."""
        count = 20_000
        target_logits, draft_logits = make_logits(seed=1), make_logits(seed=1) + make_logits(seed=2)
        rows = [make_row(seed=4, position=position) for position in range(count)]
        agreed = sum(
            x == y
            for x, y in zip(
                sample(target_logits.expand(count, -1), rows),
                sample(draft_logits.expand(count, -1), rows),
                strict=True,
            )
        )
        p, q = target_logits.double().softmax(-1)[0], draft_logits.double().softmax(-1)[0]
        ratios = torch.maximum(p[None, :] / p[:, None], q[None, :] / q[:, None])
        expected = (1 / ratios.sum(-1)).sum().item()
        deviation = (expected * (1 - expected) / count) ** 0.5
        assert abs(agreed / count - expected) < 4 * deviation


CHANGED: dict[str, object] = {
    "temperature": 0.3,
    "top_k": 2,
    "top_p": 0.2,
    "min_p": 0.6,
    "repetition_penalty": 3.0,
    "presence_penalty": 2.0,
    "frequency_penalty": 1.0,
    "logit_bias": ((3, 5.0),),
    "min_tokens": 1000,
    "stop_token_ids": tuple(range(0, VOCAB_SIZE, 2)),
    "bad_words": tuple((token,) for token in range(0, VOCAB_SIZE, 2)),
    "grammar": Grammar.regex("a"),
}
"""A value of every sampling parameter that shows: a new one has to be added."""
ALONE_WITHOUT_EFFECT = {"min_tokens", "stop_token_ids"}
"""Parameters that show together only."""
FOR_SAMPLES_ONLY = {"temperature", "top_k", "top_p", "min_p"}
"""Parameters that leave the likeliest token as it is."""


def test_every_parameter_is_tried() -> None:
    assert {*CHANGED} == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        (name, temperature)
        for name in CHANGED
        for temperature in (1.0, 0.0)
        if temperature or name not in FOR_SAMPLES_ONLY
    ],
)
def test_no_faster_way_passes_a_parameter_over(name: str, temperature: float) -> None:
    """Each changes tokens where all others have their defaults, in a batch with plain rows too."""
    names = ALONE_WITHOUT_EFFECT if name in ALONE_WITHOUT_EFFECT else {name}
    changed = {name: CHANGED[name] for name in names}
    params = SamplingParams(**{"temperature": temperature, **changed})
    plain = SamplingParams(temperature=temperature)
    history = tuple(range(VOCAB_SIZE // 2)) if params.needs_history else ()
    allowed = torch.tensor([0b10101010] * 7, dtype=torch.uint8) if params.grammar else None
    logits = make_logits(200)

    def rows(params: SamplingParams, history: tuple[int, ...] = ()) -> list[SamplingRow]:
        return [
            SamplingRow(
                params=params,
                seed=1,
                position=position,
                history=history,
                allowed=allowed if params.grammar else None,
            )
            for position in range(len(logits))
        ]

    tokens = sample(logits, rows(params, history))
    assert tokens != sample(logits, rows(plain))
    among = [*rows(params, history)[:100], *rows(plain)[100:]]
    assert sample(logits, among)[:100] == tokens[:100]
