"""What sampling parameters do to logits, against transformers' processors."""

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.workers.logits import VOCAB_SIZE, make_logits, make_row
from workers.grammar import Grammar
from workers.sampling import NO_TOKEN, SamplingRow, process_logits, sample
from workers.sampling_params import SamplingParams


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
