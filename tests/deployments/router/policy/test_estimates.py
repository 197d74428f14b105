"""What the gamma controller estimates, against drafts and machines that are known."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from deployments.router.policy.acceptance import AcceptanceEstimator
from deployments.router.policy.confidence import Calibration, Paths
from deployments.router.policy.cost import CostCurve
from deployments.router.policy.gamma import Outcome
from deployments.router.policy.round_cost import (
    NUM_TEXTS,
    RoundCost,
    UsualShare,
    draft_cost,
    verify_cost,
)
from tests.deployments.simulated_drafts import confidence, draw, judge, varied


class TestAcceptance:
    @pytest.mark.parametrize("gamma", [1, 3, 8])
    def test_the_rate_does_not_depend_on_the_draft_length(self, gamma: int) -> None:
        rng = random.Random(0)
        means = []
        for _ in range(20):
            estimator = AcceptanceEstimator()
            for _ in range(300):
                estimator.observe(draw(rng, "a", gamma, 0.8))
            means.append(estimator.survival("a", 1)[0])
        assert sum(means) / len(means) == pytest.approx(0.8, abs=0.03)

    def test_untested_positions_follow_the_others(self) -> None:
        estimator = AcceptanceEstimator()
        for _ in range(100):
            estimator.observe(
                Outcome(
                    seq_id="a", num_draft_tokens=2, num_tested=2, num_accepted=2, num_committed=3
                )
            )
        first, second, third = estimator.survival("a", 3)
        assert first > second > third > 0.8

    def test_positions_differ(self) -> None:
        """A drafter that is right once, and then never."""
        estimator = AcceptanceEstimator()
        for _ in range(100):
            estimator.observe(
                Outcome(
                    seq_id="a", num_draft_tokens=4, num_tested=2, num_accepted=1, num_committed=2
                )
            )
        first, second = estimator.survival("a", 2)
        assert first > 0.9
        assert second < 0.2

    def test_a_sequence_departs_from_its_drafter_and_is_forgotten(self) -> None:
        estimator, rng = AcceptanceEstimator(), random.Random(0)
        for _ in range(60):
            estimator.observe(draw(rng, "easy", 4, 0.9))
            estimator.observe(draw(rng, "hard", 4, 0.2))
        easy, hard = estimator.survival("easy", 1)[0], estimator.survival("hard", 1)[0]
        unknown = estimator.survival("unknown", 1)[0]
        assert hard + 0.2 < unknown < easy
        estimator.forget("hard")
        assert estimator.survival("hard", 1)[0] == unknown


class TestCalibration:
    @pytest.mark.parametrize("beta", [0.2, 0.5, 1.0, 2.0])
    def test_it_learns_what_confidence_means(self, beta: float) -> None:
        calibration, rng = Calibration(), random.Random(0)
        for _ in range(300):
            chances = [varied(rng, 0.7) for _ in range(4)]
            confidences = [confidence(chance, beta) for chance in chances]
            calibration.observe(judge(rng, "a", chances, confidences=confidences))
        for chance in (0.3, 0.6, 0.9):
            (learnt,) = calibration.survival("a", [confidence(chance, beta)])
            assert learnt == pytest.approx(chance, abs=0.07)
            product = calibration.least_product("a", chance)
            assert product == pytest.approx(confidence(chance, beta), abs=0.12)

    def test_sequences_differ_and_are_forgotten(self) -> None:
        calibration, rng = Calibration(), random.Random(0)
        for _ in range(100):
            for seq_id, beta in (("greedy", 0.4), ("sampled", 1.0)):
                chances = [varied(rng, 0.7) for _ in range(4)]
                confidences = [confidence(chance, beta) for chance in chances]
                calibration.observe(judge(rng, seq_id, chances, confidences=confidences))
        assert calibration.beta("greedy") < calibration.beta("new") < calibration.beta("sampled")
        calibration.forget("greedy")
        assert calibration.beta("greedy") == calibration.beta("new")

    def test_certain_drafts_that_fail_are_believed_less(self) -> None:
        calibration = Calibration()
        for _ in range(20):
            calibration.observe(judge(random.Random(0), "a", [0.0], confidences=[1.0]))
        assert calibration.survival("a", [1.0])[0] < 0.99
        assert calibration.survival("a", [0.9])[0] < 0.2

    def test_paths_go_on_as_sure_as_they_were(self) -> None:
        paths = Paths()
        paths.add([0.5])
        paths.add([0.9, 0.4, 0.3])
        products = np.exp(paths.log_products(2, newest=8))
        assert products == pytest.approx(np.array([[0.5, 0.25], [0.9, 0.36]]))
        assert paths.log_products(2, newest=1).shape == (1, 2)

    def test_what_fades_is_soon_outweighed(self) -> None:
        paths = Paths()
        for _ in range(200):
            paths.add([0.2, 0.2, 0.2])
        paths.fade()
        for _ in range(24):
            paths.add([0.9, 0.9, 0.9])
        paths.add([0.9])  # goes on as others did
        products = np.exp(paths.log_products(3, newest=64))
        assert len(products) == 33
        assert products[-1] == pytest.approx([0.9, 0.81, 0.73], abs=0.01)
        assert products.mean(axis=0)[0] > 0.7

    def test_sure_paths_go_on_as_others_did(self) -> None:
        """Where every other token is unsure, it is so after any number of sure ones."""
        paths = Paths()
        for _ in range(20):
            paths.add([0.9, 0.9, 0.1])
        for _ in range(64):
            paths.add([0.99])
        logs = np.diff(paths.log_products(5, newest=64), axis=1)
        assert np.exp(logs.mean()) == pytest.approx(0.3, rel=0.1)


class TestCost:
    def test_steps_in_the_costs_are_found(self) -> None:
        """Flat up to 8, then 14 more and 2 for each."""

        def true_cost(amount: int) -> float:
            return 30.0 if amount <= 8 else 44 + 2.0 * (amount - 8)

        def learnt(seed: int) -> CostCurve:
            cost, rng = CostCurve(relative_slope=0.1), random.Random(seed)
            for _ in range(1500):
                amount = rng.randint(1, 30)
                cost.observe(amount, true_cost(amount) * rng.uniform(0.95, 1.05))
            return cost

        costs = [learnt(seed) for seed in range(5)]
        for amount in (1, 5, 8, 9, 12, 20, 30):
            # a little of a step is lost, lest noise look like one
            rel = 0.09 if amount in (8, 9) else 0.02
            mean = sum(cost(amount) for cost in costs) / len(costs)
            assert mean == pytest.approx(true_cost(amount), rel=rel)

    def test_the_guess_stands_in_beyond_what_was_seen(self) -> None:
        cost = CostCurve(relative_slope=0.1)
        for _ in range(10):
            cost.observe(11, 50)
        assert cost(11) == pytest.approx(50)
        assert cost(21) == pytest.approx(75)
        assert cost(1) == pytest.approx(25)

    def test_more_never_costs_less(self) -> None:
        cost = CostCurve(relative_slope=0.1)
        for amount in (1, 2, 3, 4):
            cost.observe(amount, 10.0 - amount)  # noise
        costs = [cost(amount) for amount in range(100)]
        assert costs == sorted(costs)
        assert costs[0] > 0

    def test_a_machine_that_slows_down_slows_all_amounts(self) -> None:
        cost, rng = CostCurve(relative_slope=0.1), random.Random(0)
        for _ in range(300):
            amount = rng.randint(1, 12)
            cost.observe(amount, 20.0 + amount)
        for _ in range(60):
            cost.observe(8, 2 * 28.0)
        assert cost(8) == pytest.approx(56, rel=0.05)
        assert cost(2) == pytest.approx(44, rel=0.15)

    def test_noise_of_an_amount_does_not_move_the_others(self) -> None:
        curve, rng = CostCurve(relative_slope=0.02), random.Random(0)
        for _ in range(50):
            curve.observe(32, 20.0 * rng.gammavariate(8, 1 / 8))
        seen = []
        for _ in range(2000):
            curve.observe(16, 10.0 * rng.gammavariate(8, 1 / 8))
            seen.append(curve(32) / curve(16))
        assert np.std(seen[200:]) < 0.1 * np.mean(seen[200:])

    def test_a_pause_of_the_machine_is_soon_forgiven(self) -> None:
        cost = CostCurve(relative_slope=0.1)
        for _ in range(20):
            cost.observe(4, 50)
        cost.observe(4, 5000)
        assert cost(4) < 70
        for _ in range(10):
            cost.observe(4, 50)
        assert cost(4) < 55

    def test_what_waited_before_anything_is_known_is_not_believed(self) -> None:
        """The first calls of a router, whose connection is being made, wait for whole steps."""
        curve, rng = CostCurve(relative_slope=0.02), random.Random(0)
        for amount, cost_s in (
            (5, 0.556),
            (20, 0.057),
            (4, 0.036),
            (4, 0.047),
            (8, 0.030),
            (12, 0.040),
        ):
            curve.observe(amount, cost_s)
        for _ in range(20):
            curve.observe(4, 0.035 * rng.uniform(0.9, 1.1))
        costs_s = [curve(amount) for amount in range(1, 300)]
        assert curve(1) > 0.02
        assert costs_s == sorted(costs_s)
        assert curve(4) == pytest.approx(0.035, rel=0.1)
        assert curve(20) < 0.08

    def test_long_steps_at_first_lead_nowhere_far(self) -> None:
        """Of prompts, with which a server's first rounds share their steps."""
        curve = CostCurve(relative_slope=0.02)
        for cost_s in (0.510, 0.485, 0.521, 0.507, 0.495):
            curve.observe(256, cost_s)
            assert curve(256) == pytest.approx(0.5, rel=0.1)
            assert 0.02 < curve(1) < curve(16) < 0.2
        for amount, cost_s in ((56, 0.124), (30, 0.081), *[(16, 0.055)] * 4):
            curve.observe(amount, cost_s)
            assert curve(1) > 0.01
        assert curve(16) == pytest.approx(0.055, rel=0.1)
        assert curve(24) == pytest.approx(0.070, rel=0.15)
        assert curve(64) == pytest.approx(0.14, rel=0.15)

    def test_what_prompts_cost_does_not_make_a_few_tokens_seem_dear(self) -> None:
        """Memory limits the steps of a few tokens, arithmetic those of many."""

        def true_cost_s(amount: int) -> float:
            return 0.018 + 0.00015 * amount if amount <= 24 else 0.0009 * amount

        curve, rng = CostCurve(relative_slope=0.02), random.Random(0)
        for turn in range(300):
            amount = rng.randint(100, 256) if turn % 10 == 0 else rng.randint(8, 14)
            curve.observe(amount, true_cost_s(amount) * rng.uniform(0.95, 1.05))
        assert curve(12) == pytest.approx(true_cost_s(12), rel=0.05)
        assert curve(20) == pytest.approx(true_cost_s(20), rel=0.1)
        assert curve(200) == pytest.approx(true_cost_s(200), rel=0.1)

    @pytest.mark.parametrize("amount", [8, 12, 16])
    def test_what_was_dear_for_a_while_is_tried_again(self, amount: int) -> None:
        """Long contexts made many tokens dear; those of new texts are seen with few tokens only."""

        def true_cost_s(amount: int) -> float:
            return 0.018 + 0.0002 * amount if amount <= 24 else 0.0228 + 0.0012 * (amount - 24)

        curve, rng = CostCurve(relative_slope=0.02), random.Random(0)
        for seen in (4, 4, 8, 6, 12):
            curve.observe(seen, true_cost_s(seen))
        for turn in range(100):
            seen = rng.randint(26, 36)
            curve.observe(seen, true_cost_s(seen) * (1.0 + 0.004 * turn) * rng.uniform(0.95, 1.05))
        assert curve(30) > 1.3 * true_cost_s(30)
        for _ in range(20):
            seen = amount + rng.randint(-2, 2)
            curve.observe(seen, true_cost_s(seen) * rng.uniform(0.95, 1.05))
        assert curve(amount) == pytest.approx(true_cost_s(amount), rel=0.05)
        assert curve(30) < 1.25 * true_cost_s(30)

    def test_what_costs_far_more_than_was_guessed_is_soon_known(self) -> None:
        curve = CostCurve(relative_slope=0.001)
        for _ in range(20):
            curve.observe(4, 0.030)
        for _ in range(5):
            curve.observe(24, 0.200)
        assert curve(24) > 0.16
        assert curve(4) == pytest.approx(0.030, rel=0.1)

    @pytest.mark.parametrize("costs", [(90, 27), (27, 90)])
    def test_one_pause_does_not_make_an_amount_look_dear(self, costs: Sequence[float]) -> None:
        cost = CostCurve(relative_slope=0.02)
        for _ in range(10):
            cost.observe(4, 25)
        for cost_s in costs:
            cost.observe(8, cost_s)
        assert 25 < cost(8) < 33
        assert 25 < cost(6) < 30

    def test_noise_does_not_look_like_a_step(self) -> None:
        cost, rng = CostCurve(relative_slope=0.02), random.Random(0)
        for _ in range(100):
            cost.observe(12, rng.gauss(30, 2))
        for _ in range(2):
            cost.observe(13, 36)
        assert cost(13) - cost(12) < 3

    def test_an_amount_that_is_always_dear_is_dear(self) -> None:
        cost = CostCurve(relative_slope=0.02)
        for _ in range(10):
            cost.observe(4, 25)
        for _ in range(20):
            cost.observe(8, 90)
        assert cost(8) == pytest.approx(90, rel=0.1)
        assert cost(4) < 40


class TestSizedCost:
    def test_many_sequences_cost_more_and_are_known_apart(self) -> None:
        cost, rng = draft_cost(), random.Random(0)
        for num_sequences, step_s in ((1, 0.001), (8, 0.002), (16, 0.003), (1, 0.001)):
            for _ in range(30):
                longest = rng.randint(1, 6)
                cost.observe(num_sequences, longest, 0.002 + step_s * longest)
        for num_sequences, step_s in ((1, 0.001), (8, 0.002), (9, 0.002), (16, 0.003), (64, 0.003)):
            assert cost.of(num_sequences)(4) == pytest.approx(0.002 + 4 * step_s, rel=0.1)

    @pytest.mark.parametrize("num_streams", [4, 8, 16, 32])
    def test_a_stream_more_or_less_is_the_same_to_it(self, num_streams: int) -> None:
        """Of so many streams, one is missing in the rounds beside its next prompt."""
        cost = verify_cost()
        for _ in range(20):
            cost.observe(num_streams, 5, 0.020)
        for _ in range(40):
            cost.observe(num_streams - 1, 5, 0.030)
        assert cost.of(num_streams)(5) == pytest.approx(0.030, rel=0.05)

    def test_a_number_that_is_new_begins_like_the_nearest(self) -> None:
        cost = draft_cost()
        for _ in range(50):
            cost.observe(1, 4, 0.004)
        cost.observe(16, 4, 0.004)
        assert cost.of(16)(4) == pytest.approx(0.004)
        for _ in range(10):  # once, it may have been a pause
            cost.observe(16, 2, 0.010)
        assert cost.of(16)(2) > 0.007
        assert cost.of(1)(4) == pytest.approx(0.004)


class TestRoundCost:
    def known(self) -> RoundCost:
        """Drafts of up to four, and plain rounds, of one sequence."""
        cost = RoundCost()
        for k in range(60):
            cost.draft.observe(1, k % 5 + 1, 0.004 + 0.001 * (k % 5))
            cost.verify.observe(1, k % 6 + 1, 0.020)
        return cost

    @pytest.mark.parametrize("factor", [0.5, 2.0])
    def test_a_machine_that_changes_while_idle_changes_for_drafters_too(
        self, factor: float
    ) -> None:
        cost = self.known()
        draft, verify = cost.draft.of(1)(4), cost.verify.of(1)(5)
        for _ in range(400):
            cost.observe_plain(1, 1, factor * 0.020, is_idle=True)
        assert cost.draft.of(1)(4) == pytest.approx(factor * draft, rel=0.1)
        assert cost.verify.of(1)(5) == pytest.approx(factor * verify, rel=0.1)

    def test_rounds_that_are_alike_are_learnt_together(self) -> None:
        cost, times_s = self.known(), [0.021, 0.023, 0.022, 0.022]
        same = self.known()
        for time_s in times_s[:-1]:
            cost.observe_plain(1, 1, time_s, is_idle=True)
            assert cost.verify.of(1).at(np.arange(8)) == pytest.approx(
                same.verify.of(1).at(np.arange(8))
            )
        cost.observe_plain(1, 1, times_s[-1], is_idle=True)
        same.verify.observe(1, 1, sum(times_s) / 4)
        assert cost.verify.of(1).at(np.arange(8)) == pytest.approx(
            same.verify.of(1).at(np.arange(8))
        )

    def test_what_waits_is_learnt_when_rounds_change(self) -> None:
        cost, same = self.known(), self.known()
        cost.observe_plain(1, 1, 0.030, is_idle=True)
        cost.observe_plain(2, 2, 0.025, is_idle=True)
        same.verify.observe(1, 1, 0.030)
        assert cost.verify.of(1)(1) == pytest.approx(same.verify.of(1)(1))
        cost.learn_plain()
        cost.learn_plain()  # once only
        same.verify.observe(2, 2, 0.025)
        assert cost.verify.of(2)(2) == pytest.approx(same.verify.of(2)(2))


class TestUsualShare:
    def test_it_is_what_the_last_texts_were_left(self) -> None:
        usual = UsualShare()
        for share in (0.9, 0.8, 1.7):  # more than without prompts is luck
            usual.observe(share)
        assert usual.share == pytest.approx((1.0 + 0.9 + 0.8 + 1.0) / 4)
        for _ in range(5 * NUM_TEXTS):
            usual.observe(0.2)
        assert usual.share == pytest.approx(0.2, abs=0.01)

    def test_one_text_says_little_of_the_others(self) -> None:
        usual = UsualShare()
        for _ in range(NUM_TEXTS):
            usual.observe(0.9)
        usual.observe(0.1)
        assert usual.share > 0.85
