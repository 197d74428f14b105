"""What is learnt of acceptance, against drafts whose chances are known."""

import pickle
import random

import numpy as np
import pytest

from deployments.router.policy.acceptance import Acceptance, AcceptanceBySource
from deployments.router.policy.gamma import Candidate, Drafted, Outcome
from tests.deployments.simulated_drafts import confidence, draw, judge, varied


def silent(num_draft_tokens: int, seq_id: str = "new") -> Drafted:
    return Drafted(seq_id=seq_id, num_draft_tokens=num_draft_tokens)


def sure(*confidences: float, seq_id: str = "new") -> Drafted:
    return Drafted(seq_id=seq_id, num_draft_tokens=len(confidences), confidences=confidences)


class TestSilentSources:
    @pytest.mark.parametrize("gamma", [1, 3, 8])
    def test_the_rate_does_not_depend_on_the_draft_length(self, gamma: int) -> None:
        rng, means = random.Random(0), []
        for _ in range(20):
            acceptance = Acceptance()
            for _ in range(300):
                acceptance.observe(draw(rng, "a", gamma, 0.8))
            means.append(acceptance.survival(silent(1, "a"))[0])
        assert sum(means) / len(means) == pytest.approx(0.8, abs=0.04)

    def test_untested_positions_follow_the_others(self) -> None:
        acceptance = Acceptance()
        for _ in range(100):
            acceptance.observe(
                Outcome(
                    seq_id="a", num_draft_tokens=2, num_tested=2, num_accepted=2, num_committed=3
                )
            )
        first, second, third = acceptance.survival(silent(3))
        assert first > second > third > 0.8

    def test_positions_differ(self) -> None:
        """A drafter that is right once, and then never."""
        acceptance = Acceptance()
        for index in range(100):
            acceptance.observe(
                Outcome(
                    seq_id=f"{index}", num_draft_tokens=4, num_tested=2, num_accepted=1,
                    num_committed=2,
                )
            )  # fmt: skip
        first, second = acceptance.survival(silent(2))
        assert first > 0.9
        assert second < 0.2

    def test_a_sequence_departs_from_its_source_and_is_forgotten(self) -> None:
        acceptance, rng = Acceptance(), random.Random(0)
        for _ in range(60):
            acceptance.observe(draw(rng, "easy", 4, 0.9))
            acceptance.observe(draw(rng, "hard", 4, 0.2))
        easy, hard, unknown = (
            acceptance.survival(silent(1, seq_id))[0] for seq_id in ("easy", "hard", "unknown")
        )
        assert hard + 0.2 < unknown < easy
        acceptance.forget("hard")
        assert acceptance.survival(silent(1, "hard"))[0] == unknown


class TestConfidences:
    @pytest.mark.parametrize("beta", [0.2, 0.5, 1.0, 2.0])
    def test_what_they_mean_is_learnt(self, beta: float) -> None:
        acceptance, rng = Acceptance(), random.Random(0)
        for _ in range(300):
            chances = [varied(rng, 0.7) for _ in range(4)]
            confidences = [confidence(chance, beta) for chance in chances]
            acceptance.observe(judge(rng, "a", chances, confidences=confidences))
        for chance in (0.3, 0.6, 0.9):
            (learnt,) = acceptance.survival(sure(confidence(chance, beta), seq_id="a"))
            assert learnt == pytest.approx(chance, abs=0.07)
            product = acceptance.least_product("a", chance)
            assert product == pytest.approx(confidence(chance, beta), abs=0.12)

    def test_certain_drafts_that_fail_are_believed_less(self) -> None:
        acceptance = Acceptance()
        for _ in range(30):
            acceptance.observe(judge(random.Random(0), "a", [0.0], confidences=[1.0]))
        assert acceptance.survival(sure(1.0))[0] < 0.995
        assert acceptance.survival(sure(0.9))[0] < 0.3

    def test_the_next_drafts_are_foreseen_to_be_like_the_last(self) -> None:
        acceptance = Acceptance()
        for _ in range(20):
            acceptance.remember(sure(0.9, 0.5, 0.5))
            acceptance.remember(sure(0.2))
        survival = acceptance.foresee(["a", "b"], 4, 8, optimism=0.0)
        assert survival.shape == (2, 8, 4)
        first, second = acceptance.survival(sure(0.9, 0.5)), acceptance.survival(sure(0.2, 0.5))
        # a draft that ended goes on like others did
        assert np.unique(survival[:, :, 0]) == pytest.approx([second[0], first[0]])
        assert np.unique(survival[:, :, 1]) == pytest.approx([second[1], first[1]])

    def test_no_drafts_are_foreseen_where_none_can_be_had(self) -> None:
        """As of early exit, whose drafts are asked for a round ahead, at the end of a text."""
        acceptance = Acceptance()
        acceptance.remember(sure(0.9))
        assert acceptance.foresee(["a"], 0, 8, optimism=0.0).size == 0

    def test_optimism_fades_with_what_is_known(self) -> None:
        acceptance, rng = Acceptance(), random.Random(0)

        def benefit() -> float:
            seen = acceptance.foresee(["new"], 1, 4, optimism=0.0).mean()
            return float(acceptance.foresee(["new"], 1, 4, optimism=1.0).mean() - seen)

        before = benefit()
        for _ in range(100):
            acceptance.observe(draw(rng, "a", 2, 0.7))
        assert 0 < benefit() < before / 2


def test_sources_and_kinds_are_known_apart() -> None:
    known, rng = AcceptanceBySource(), random.Random(0)
    kinds = [("model", False, 0.9), ("model", True, 0.5), ("prompt_lookup", False, 0.1)]
    for _ in range(100):
        for source, is_sampled, alpha in kinds:
            outcome = judge(rng, "a", [alpha] * 2, is_sampled=is_sampled, source=source)
            known.of(outcome).observe(outcome)
    candidates = [
        Candidate(seq_id="new", max_gamma=2, source=source, is_sampled=is_sampled)
        for source, is_sampled, _ in kinds
    ]
    survival = known.foresee(candidates, num_samples=2, optimism=0.0)
    assert survival[:, 0, 0] == pytest.approx([0.9, 0.5, 0.1], abs=0.12)


def test_nothing_is_kept_of_sequences_that_have_ended() -> None:
    known, rng, sizes = AcceptanceBySource(), random.Random(0), []
    for index in range(400):
        outcome = draw(rng, f"sequence {index}", 4, 0.8)
        known.of(outcome).observe(outcome)
        known.forget(outcome.seq_id)
        known.forget(outcome.seq_id)  # as of one that a drafter was still at work on
        sizes.append(len(pickle.dumps(known)))
    assert sizes[-1] == sizes[200]
