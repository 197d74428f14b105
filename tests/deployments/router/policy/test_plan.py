"""The plan of a round against a search of all plans."""

import random
from itertools import product

import numpy as np
import pytest

from deployments.router.policy.plan import best_plan, worth_verifying
from deployments.router.policy.round_cost import RoundCost

DEPTH = 3
NUM_SEQUENCES = 3


def make_cost(seed: int) -> RoundCost:
    """A machine whose costs never fall, but rise by steps."""
    rng, cost = random.Random(seed), RoundCost()
    draft_s, verify_s = 0.003, 0.020
    for amount in range(1, 17):
        cost.draft.observe(NUM_SEQUENCES, amount, draft_s)
        cost.verify.observe(NUM_SEQUENCES, amount, verify_s)
        draft_s += rng.choice([0.0, 0.0005, 0.002, 0.005])
        verify_s += rng.choice([0.0, 0.0005, 0.002, 0.005])
    return cost


def make_survival(seed: int) -> list[list[float]]:
    rng = random.Random(seed)
    return [
        np.cumprod([rng.uniform(0.2, 1.0) for _ in range(DEPTH)]).tolist()
        for _ in range(NUM_SEQUENCES)
    ]


def expected(survival: list[list[float]], gammas: tuple[int, ...]) -> float:
    return NUM_SEQUENCES + sum(sum(s[:k]) for s, k in zip(survival, gammas, strict=True))


def time_s(gammas: tuple[int, ...], cost: RoundCost, num_beside: int) -> float:
    draft_s = cost.draft.of(NUM_SEQUENCES)(max(gammas)) if any(gammas) else 0.0
    return draft_s + cost.verify.of(NUM_SEQUENCES)(num_beside + NUM_SEQUENCES + sum(gammas))


ALL_GAMMAS = list(product(range(DEPTH + 1), repeat=NUM_SEQUENCES))


@pytest.mark.parametrize("seed", range(40))
def test_no_plan_is_better_where_survival_is_known(seed: int) -> None:
    survival, cost = make_survival(seed), make_cost(seed)

    def rate(gammas: tuple[int, ...]) -> float:
        return expected(survival, gammas) / time_s(gammas, cost, 0)

    plan = best_plan(np.array(survival)[:, None, :], cost, num_beside=0)
    best = max(map(rate, ALL_GAMMAS))
    assert plan.tokens_per_s == pytest.approx(best)
    assert rate(tuple(plan.gammas)) == pytest.approx(best)


@pytest.mark.parametrize(
    ("left", "usual_share", "share"),
    [
        (0.1, 1.0, 0.1),
        (0.25, 1.0, 0.25),
        (0.4, 1.0, 0.64),
        (0.5, 1.0, 1.0),
        (2.0, 1.0, 1.0),
        (0.1, 0.25, 0.64),
        (0.125, 0.25, 1.0),
        (0.4, 0.25, 1.0),
    ],
)
@pytest.mark.parametrize("seed", range(40))
def test_beside_prompts_that_leave_little_time_is_worth_less(
    seed: int, left: float, usual_share: float, share: float
) -> None:
    """`left` of the rate of the sequences alone, time is worth `share` of that rate."""
    survival, cost = make_survival(seed), make_cost(seed)
    samples = np.array(survival)[:, None, :]
    alone = best_plan(samples, cost, num_beside=0).tokens_per_s
    worth = share * alone

    def gain(gammas: tuple[int, ...]) -> float:
        return expected(survival, gammas) - worth * time_s(gammas, cost, 6)

    plan = best_plan(samples, cost, num_beside=6, recent_rate=left * alone, usual_share=usual_share)
    assert plan.tokens_per_s == pytest.approx(worth)
    assert gain(tuple(plan.gammas)) == pytest.approx(max(map(gain, ALL_GAMMAS)))


@pytest.mark.parametrize("seed", range(40))
def test_drafts_that_must_be_made_lose_the_least(seed: int) -> None:
    survival, cost = make_survival(seed), make_cost(seed)
    survival = [[0.1 * chance for chance in of_sequence] for of_sequence in survival]
    samples = np.array(survival)[:, None, :]
    plain = best_plan(samples, cost, num_beside=0)
    assert not any(plain.gammas)

    def loss(gammas: tuple[int, ...]) -> float:
        worth = plain.tokens_per_s * time_s(gammas, cost, 0)
        return (worth - expected(survival, gammas)) / NUM_SEQUENCES

    tried = best_plan(samples, cost, num_beside=0, must_draft=True)
    assert any(tried.gammas)
    least = min(map(loss, filter(any, ALL_GAMMAS)))
    # drafts that hardly survive are not thought of
    assert loss(tuple(tried.gammas)) == pytest.approx(least, abs=0.02)
    assert plain.loss == pytest.approx(loss(tuple(tried.gammas)))


def test_a_plan_counts_with_choosing_later() -> None:
    """Half of the drafts are sure and half hopeless: drafting pays, as only the sure are kept."""
    cost = RoundCost()
    for amount in range(1, 64):
        cost.draft.observe(8, amount, 0.001)
        cost.verify.observe(8, amount, 0.010 + 0.001 * amount)
    sure, hopeless = [0.99] * 2, [0.1, 0.01]
    mixed = best_plan(np.array([[sure, hopeless]] * 8), cost, num_beside=0)
    assert mixed.gammas == [2] * 8
    assert mixed.least_survival == 0.99
    assert not any(best_plan(np.array([[hopeless]] * 8), cost, num_beside=0).gammas)


def test_a_plan_counts_with_drafters_that_stop() -> None:
    """One draft in five is sure throughout: long ones take long only then."""
    cost = RoundCost()
    for amount in range(1, 17):
        cost.draft.observe(1, amount, 0.002 + 0.002 * amount)
        cost.verify.observe(1, amount, 0.020)
    sure, hopeless = [0.97**k for k in range(1, 17)], [0.1 * 0.01**k for k in range(16)]
    plan = best_plan(np.array([[sure] + [hopeless] * 4]), cost, num_beside=0)
    assert plan.gammas == [16]
    assert 0.1 < plan.least_survival <= sure[-1]


@pytest.mark.parametrize("seed", range(40))
def test_no_other_drafts_are_worth_more_of_the_targets_time(seed: int) -> None:
    survival, verify = make_survival(seed), make_cost(seed).verify.of(NUM_SEQUENCES)
    price = random.Random(seed).uniform(50, 400)

    def worth(gammas: tuple[int, ...]) -> float:
        return expected(survival, gammas) - price * verify(2 + NUM_SEQUENCES + sum(gammas))

    kept = worth_verifying(survival, verify, num_others=2, tokens_per_s=price)
    assert worth(tuple(kept)) == pytest.approx(max(map(worth, ALL_GAMMAS)))


def test_nothing_to_draft_is_no_plan_to_draft() -> None:
    cost = make_cost(0)
    for shape in ((2, 1, 4), (2, 1, 0), (0, 1, 0)):
        assert not any(best_plan(np.zeros(shape), cost, num_beside=0).gammas)
    assert worth_verifying([], cost.verify.of(1), num_others=2, tokens_per_s=100.0) == []
