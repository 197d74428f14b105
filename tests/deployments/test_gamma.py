"""The gamma controller against simulated rounds, whose acceptance and costs are known."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from deployments.router.acceptance import AcceptanceEstimator
from deployments.router.confidence import Calibration, Paths
from deployments.router.cost import CostCurve, DraftCost
from deployments.router.dynamic_gamma import LONGEST_PROBE, SHORTEST_PAUSE, DynamicGamma
from deployments.router.gamma import (
    Candidate,
    Drafted,
    FixedGamma,
    GammaController,
    ObservedRound,
    Outcome,
)

MAX_GAMMA = 8


DRAFTER_BETA = 0.35
"""Of the simulated drafter: it is accepted more often than its confidence says."""


def judge(
    rng: random.Random, seq_id: str, chances: Sequence[float], *, confidences: Sequence[float] = ()
) -> Outcome:
    """What becomes of drafts that are accepted with these probabilities."""
    num_accepted = 0
    while num_accepted < len(chances) and rng.random() < chances[num_accepted]:
        num_accepted += 1
    return Outcome(
        seq_id=seq_id,
        num_draft_tokens=len(chances),
        num_tested=min(num_accepted + 1, len(chances)),
        num_accepted=num_accepted,
        confidences=tuple(confidences),
    )


def draw(rng: random.Random, seq_id: str, num_drafts: int, alpha: float) -> Outcome:
    """What becomes of drafts that are each accepted with probability alpha."""
    return judge(rng, seq_id, [alpha] * num_drafts)


def confidence(chance: float, beta: float = DRAFTER_BETA) -> float:
    """That a drafter states of a token with this chance."""
    return chance ** (1 / beta)


Chance = Callable[[random.Random, float], float]


def even(_: random.Random, alpha: float) -> float:
    """Every token is as good as the others."""
    return alpha


def varied(rng: random.Random, alpha: float) -> float:
    """Many tokens are sure or hopeless; on average they are accepted with probability alpha."""
    return rng.betavariate(1.2 * alpha, 1.2 * (1 - alpha))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Milliseconds of a round: drafting to a depth, verifying a number of tokens."""

    hop: float
    draft_step: float
    verify: float
    verify_token: float
    verify_wide: float = 0.0
    """More than 8 tokens cost this much more, as with matrix kernels that work in blocks."""

    def draft_s(self, longest: int) -> float:
        return (self.hop + self.draft_step * longest) / 1e3 if longest else 0.0

    def verify_s(self, num_tokens: int) -> float:
        is_wide = num_tokens > 8
        return (self.verify + self.verify_token * num_tokens + self.verify_wide * is_wide) / 1e3


# one stream on a CPU, a GPU with a slow network, a machine whose batch is full already
CPU = Machine(hop=4, draft_step=1.5, verify=38, verify_token=1)
REMOTE = Machine(hop=8, draft_step=1, verify=25, verify_token=0.05)
FULL = Machine(hop=4, draft_step=1.5, verify=10, verify_token=8)
BLOCKS = Machine(hop=5, draft_step=2, verify=46, verify_token=0.8, verify_wide=14)
MACHINES = {"cpu": CPU, "remote": REMOTE, "full": FULL, "blocks": BLOCKS}


@dataclass
class Run:
    tokens: list[float]
    """To be expected of each round, so that luck does not count."""
    times_s: list[float]
    gammas: list[list[int]]

    def tokens_per_s(self, start: int = 0, end: int | None = None) -> float:
        """Of the rounds from `start` to `end`."""
        return sum(self.tokens[start:end]) / sum(self.times_s[start:end])


def simulate(
    controller: GammaController,
    machine: Machine,
    alphas: Callable[[int], Sequence[float]],
    num_rounds: int,
    *,
    seed: int = 0,
    chance: Chance | None = None,
) -> Run:
    """`alphas(round)` are those of the sequences of a round; noise of 10 % on every time.

    With a `chance`, drafts have one each, and the drafter says how sure it is; without, it is
    silent.
    """
    rng = random.Random(seed)
    run = Run([], [], [])
    observed: ObservedRound | None = None
    for index in range(num_rounds):
        of_round = alphas(index)
        candidates = [Candidate(seq_id=str(i), max_gamma=MAX_GAMMA) for i in range(len(of_round))]
        decision = controller.choose(candidates)
        chances: dict[int, list[float]] = {}
        for i, (gamma, stop_below) in enumerate(
            zip(decision.gammas, decision.stop_below, strict=True)
        ):
            product = 1.0
            while len(chances.get(i, ())) < gamma and product >= stop_below:
                chances.setdefault(i, []).append((chance or even)(rng, of_round[i]))
                product *= confidence(chances[i][-1])
        drafted = [
            Drafted(
                seq_id=str(i),
                num_draft_tokens=len(of_sequence),
                confidences=tuple(confidence(c) for c in of_sequence) if chance else (),
            )
            for i, of_sequence in chances.items()
        ]
        kept = controller.keep(decision, drafted, num_undrafted=len(candidates) - len(drafted))
        if observed is not None:  # as the loop does, while the target is at work
            controller.observe(observed)
        controller.prepare(candidates)
        outcomes = tuple(
            judge(
                rng, of_sequence.seq_id, chances[int(of_sequence.seq_id)][:num_kept],
                confidences=of_sequence.confidences[:num_kept],
            )
            for of_sequence, num_kept in zip(drafted, kept, strict=True)
            if num_kept > 0
        )  # fmt: skip
        num_tokens = len(of_round) + sum(kept)
        longest = max(map(len, chances.values()), default=0)
        observed = ObservedRound(
            reason=decision.reason,
            outcomes=outcomes,
            num_drafted=len(drafted),
            longest_draft=longest,
            num_tokens=num_tokens,
            is_draft_typical=True,
            is_verify_typical=True,
            is_overlapped=False,
            is_after_overlap=False,
            draft_s=machine.draft_s(longest) * rng.uniform(0.9, 1.1),
            verify_s=machine.verify_s(num_tokens) * rng.uniform(0.9, 1.1),
        )
        run.tokens.append(
            len(of_round)
            + sum(
                math.prod(chances[int(outcome.seq_id)][: position + 1])
                for outcome in outcomes
                for position in range(outcome.num_draft_tokens)
            )
        )
        run.times_s.append(observed.draft_s + observed.verify_s)
        by_sequence = {int(outcome.seq_id): outcome.num_draft_tokens for outcome in outcomes}
        run.gammas.append([by_sequence.get(i, 0) for i in range(len(of_round))])
    return run


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
            estimator.observe(Outcome(seq_id="a", num_draft_tokens=2, num_tested=2, num_accepted=2))
        first, second, third = estimator.survival("a", 3)
        assert first > second > third > 0.8

    def test_positions_differ(self) -> None:
        """A drafter that is right once, and then never."""
        estimator = AcceptanceEstimator()
        for _ in range(100):
            estimator.observe(Outcome(seq_id="a", num_draft_tokens=4, num_tested=2, num_accepted=1))
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


class TestCost:
    def test_steps_in_the_costs_are_found(self) -> None:
        """Flat up to 8, then 14 more and 2 for each."""

        def true_cost(amount: int) -> float:
            return 30.0 if amount <= 8 else 44 + 2.0 * (amount - 8)

        cost, rng = CostCurve(relative_slope=0.1), random.Random(0)
        for _ in range(1500):
            amount = rng.randint(1, 30)
            cost.observe(amount, true_cost(amount) * rng.uniform(0.95, 1.05))
        for amount in (1, 5, 8, 9, 12, 20, 30):
            assert cost(amount) == pytest.approx(true_cost(amount), rel=0.04)

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

    def test_a_pause_of_the_machine_is_soon_forgiven(self) -> None:
        cost = CostCurve(relative_slope=0.1)
        for _ in range(20):
            cost.observe(4, 50)
        cost.observe(4, 5000)
        assert cost(4) < 70
        for _ in range(10):
            cost.observe(4, 50)
        assert cost(4) < 55


class TestDraftCost:
    def test_many_sequences_cost_more_and_are_known_apart(self) -> None:
        cost, rng = DraftCost(), random.Random(0)
        for num_sequences, step_s in ((1, 0.001), (8, 0.002), (16, 0.003), (1, 0.001)):
            for _ in range(30):
                longest = rng.randint(1, 6)
                cost.observe(num_sequences, longest, 0.002 + step_s * longest)
        for num_sequences, step_s in ((1, 0.001), (8, 0.002), (9, 0.002), (16, 0.003), (64, 0.003)):
            assert cost.of(num_sequences)(4) == pytest.approx(0.002 + 4 * step_s, rel=0.1)

    def test_a_number_that_is_new_begins_like_the_nearest(self) -> None:
        cost = DraftCost()
        for _ in range(50):
            cost.observe(1, 4, 0.004)
        cost.observe(16, 2, 0.010)
        assert cost.of(16)(2) > 0.006
        assert cost.of(1)(4) == pytest.approx(0.004)


class TestDynamicGamma:
    @pytest.mark.parametrize("chance", [None, varied])
    @pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
    @pytest.mark.parametrize("num_sequences", [1, 8])
    @pytest.mark.parametrize("alpha", [0.05, 0.4, 0.7, 0.9])
    def test_it_is_as_good_as_the_best_fixed_gamma(
        self, alpha: float, num_sequences: int, machine: Machine, chance: Chance | None
    ) -> None:
        def alphas(_: int) -> list[float]:
            return [alpha] * num_sequences

        def speed(controller: GammaController) -> float:
            return simulate(controller, machine, alphas, 700, chance=chance).tokens_per_s()

        speeds = {gamma: speed(FixedGamma(gamma)) for gamma in (0, 1, 2, 4, 6, 8)}
        dynamic = speed(DynamicGamma())
        assert dynamic > 0.96 * max(speeds.values()), speeds

    def test_with_many_sequences_only_sure_drafts_are_verified(self) -> None:
        machine = Machine(hop=2, draft_step=1, verify=20, verify_token=1.5)

        def speed(controller: GammaController) -> float:
            run = simulate(controller, machine, lambda _: [0.75] * 16, 500, chance=varied)
            return run.tokens_per_s()

        best = max(speed(FixedGamma(gamma)) for gamma in (0, 1, 2, 4, 6, 8))
        assert speed(DynamicGamma()) > 1.05 * best

    def test_it_beats_every_fixed_gamma_where_sequences_differ(self) -> None:
        alphas = [0.95] * 4 + [0.05] * 4
        machine = Machine(hop=2, draft_step=1, verify=20, verify_token=2)
        speeds = [
            simulate(FixedGamma(gamma), machine, lambda _: alphas, 1000).tokens_per_s()
            for gamma in (0, 1, 2, 4, 6, 8)
        ]
        run = simulate(DynamicGamma(), machine, lambda _: alphas, 1000)
        assert run.tokens_per_s() > 1.05 * max(speeds)
        settled = run.gammas[500:]
        mean = [sum(gammas[i] for gammas in settled) / len(settled) for i in range(8)]
        assert min(mean[:4]) > 4
        assert max(mean[4:]) < 1

    @pytest.mark.parametrize("seed", range(5))
    def test_it_follows_traffic_that_changes_within_100_rounds(self, seed: int) -> None:
        def alphas(index: int) -> list[float]:
            return [0.03 if 300 <= index < 700 else 0.85]

        run = simulate(DynamicGamma(), CPU, alphas, 1100, seed=seed)
        plain = simulate(FixedGamma(0), CPU, lambda _: [0.5], 400).tokens_per_s()
        easy = simulate(FixedGamma(6), CPU, lambda _: [0.85], 4000).tokens_per_s()
        assert run.tokens_per_s(400, 700) > 0.95 * plain
        assert run.tokens_per_s(100, 300) > 0.9 * easy  # 200 rounds are few: luck shows
        assert run.tokens_per_s(800, 1100) > 0.9 * easy

    def test_drafts_that_do_not_pay_are_tried_rarely(self) -> None:
        run = simulate(DynamicGamma(), CPU, lambda _: [0.0] * 4, 1000)
        drafted = [gammas for gammas in run.gammas[200:] if any(gammas)]
        assert 0 < len(drafted) <= 800 / SHORTEST_PAUSE + 1
        assert all(sum(gamma > 0 for gamma in gammas) == 1 for gammas in drafted)

    def test_a_probe_waits_for_a_drafter_that_has_to_catch_up(self) -> None:
        controller = DynamicGamma()
        simulate(controller, CPU, lambda _: [0.0], 200)
        candidates = [Candidate(seq_id="0", max_gamma=MAX_GAMMA)]

        def undrafted_round() -> int:
            decision = controller.choose(candidates)
            (gamma,) = decision.gammas
            observed = ObservedRound(
                reason=decision.reason,
                outcomes=(), num_drafted=0, longest_draft=0, num_tokens=1, is_draft_typical=True,
                is_verify_typical=True, is_overlapped=False, is_after_overlap=False, draft_s=0.0,
                verify_s=CPU.verify_s(1),
            )  # fmt: skip
            controller.observe(observed)
            return gamma

        gammas = [undrafted_round() for _ in range(5 * SHORTEST_PAUSE)]
        first = next(index for index, gamma in enumerate(gammas) if gamma > 0)
        assert all(gammas[first : first + LONGEST_PROBE])
        assert not any(gammas[first + LONGEST_PROBE : first + LONGEST_PROBE + SHORTEST_PAUSE - 1])

    def test_nothing_is_drafted_where_nothing_may_be(self) -> None:
        controller = DynamicGamma()
        simulate(controller, CPU, lambda _: [0.9, 0.9], 100)
        candidates = [Candidate(seq_id="0", max_gamma=0), Candidate(seq_id="1", max_gamma=3)]
        first, second = controller.choose(candidates).gammas
        assert first == 0
        assert 0 < second <= 3
        assert controller.choose([Candidate(seq_id="0", max_gamma=0)]).gammas == [0]
        assert controller.choose([]).gammas == []
