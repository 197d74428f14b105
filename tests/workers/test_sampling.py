"""The sampler: what it draws, how sure it is, its law by chi-square."""

import dataclasses

import pytest
import torch

from tests.goodness_of_fit import chisquare_pvalue
from tests.workers.logits import VOCAB_SIZE, make_logits, make_row
from workers.grammar import Grammar
from workers.sampling import (
    SamplingRow,
    gumbel_noise,
    perturbed_scores,
    process_logits,
    sample,
    sample_with_confidence,
)
from workers.sampling_params import SamplingParams


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
            {"temperature": 0.6},
            {"temperature": 1.0},
            {"temperature": 1.5},
            {"temperature": 1.5, "top_k": 8},
            {"temperature": 0.6, "top_p": 0.7},
            {"temperature": 1.5, "min_p": 0.05},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
            {"repetition_penalty": 1.5},
            {"presence_penalty": 1.0, "frequency_penalty": 0.5},
            {"logit_bias": ((3, 2.0), (9, -100.0))},
        ],
        ids=str,
    )
    def test_samples_follow_the_processed_law(self, params: dict[str, object]) -> None:
        """One seeded chi-square per combination: 6,000 positions of one sequence.

        A temperature that is off by a fifth is found.
        """
        count = 6000
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
        assert chisquare_pvalue(counts[kept], pooled[kept]) > 1e-4


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
