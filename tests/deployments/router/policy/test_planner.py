"""The plan of a round against a search of all plans."""

import random
from itertools import product

import numpy as np
import pytest

from deployments.router.policy.gamma import Maker, ObservedRound, Reason
from deployments.router.policy.latency import Latency
from deployments.router.policy.planner import (
    DELAY_SHARE,
    Plan,
    Prompts,
    best_plan,
    worth_verifying,
)
from workers.types import StepTime

DEPTH = 3
NUM_SEQUENCES = 3
NO_PROMPTS = Prompts()
ALL_GAMMAS = list(product(range(DEPTH + 1), repeat=NUM_SEQUENCES))
Survival = list[list[float]]


def make_survival(seed: int) -> Survival:
    rng = random.Random(seed)
    return [np.cumprod([rng.random() for _ in range(DEPTH)]).tolist() for _ in range(NUM_SEQUENCES)]


def make_latency(seed: int) -> Latency:
    """Steps of uneven height."""
    rng = random.Random(seed)
    seconds = np.cumsum([0.01, *(0.004 * rng.random() ** 3 for _ in range(40))])
    target = [
        StepTime(num_sequences=1, num_tokens=index + 1, seconds=float(step_s))
        for index, step_s in enumerate(seconds)
    ]
    draft = [StepTime(num_sequences=1, num_tokens=1, seconds=0.002 * rng.random())]
    return Latency(target_steps=target, draft_steps=draft)


def expected(survival: Survival, gammas: tuple[int, ...]) -> float:
    pairs = zip(survival, gammas, strict=True)
    return len(gammas) + sum(sum(chances[:gamma]) for chances, gamma in pairs)


def time_s(gammas: tuple[int, ...], latency: Latency, num_beside: float = 0) -> float:
    draft_s = float(latency.draft_s(len(gammas), max(gammas))) if any(gammas) else 0.0
    num_tokens = num_beside + len(gammas) + sum(gammas)
    return draft_s + float(latency.verify_s(len(gammas), num_tokens, is_after_drafting=True))


def plan_of(
    survival: Survival,
    latency: Latency,
    *,
    maker: Maker = Maker.DRAFTER,
    prompts: Prompts = NO_PROMPTS,
) -> Plan:
    samples = np.array(survival)[:, None, :]
    return best_plan(samples, [maker] * len(survival), latency, prompts)


@pytest.mark.parametrize("seed", range(40))
def test_no_plan_is_better_where_survival_is_known(seed: int) -> None:
    survival, latency = make_survival(seed), make_latency(seed)

    def rate(gammas: tuple[int, ...]) -> float:
        return expected(survival, gammas) / time_s(gammas, latency)

    plan, best = plan_of(survival, latency), max(map(rate, ALL_GAMMAS))
    assert plan.tokens_per_s == pytest.approx(best)
    if plan.loss_s < 0.0:
        assert rate(tuple(plan.gammas)) == pytest.approx(best)
    else:
        assert rate((0,) * NUM_SEQUENCES) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(20))
def test_drafts_that_do_not_pay_lose_the_least(seed: int) -> None:
    latency = make_latency(seed)
    survival = [[0.1 * chance for chance in chances] for chances in make_survival(seed)]
    plan = plan_of(survival, latency)

    def loss_s(gammas: tuple[int, ...]) -> float:
        return time_s(gammas, latency) - expected(survival, gammas) / plan.tokens_per_s

    plain_loss_s = loss_s((0,) * NUM_SEQUENCES)
    least_s = min(map(loss_s, filter(any, ALL_GAMMAS)))
    assert any(plan.gammas)
    assert plan.loss_s == pytest.approx(least_s - plain_loss_s, abs=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_free_drafts_cost_their_verification_only(seed: int) -> None:
    survival, latency = make_survival(seed), make_latency(seed)

    def rate(gammas: tuple[int, ...]) -> float:
        num_tokens = NUM_SEQUENCES + sum(gammas)
        return expected(survival, gammas) / float(
            latency.verify_s(NUM_SEQUENCES, num_tokens, is_after_drafting=True)
        )

    plan = plan_of(survival, latency, maker=Maker.NOBODY)
    assert plan.tokens_per_s == pytest.approx(max(map(rate, ALL_GAMMAS)))
    assert plan.draft_s == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_drafts_of_the_target_cost_its_own_time(seed: int) -> None:
    survival, latency = make_survival(seed), make_latency(seed)
    latency.observe(own_drafts(num_sequences=NUM_SEQUENCES, longest=2, ahead_s=0.004))

    def rate(gammas: tuple[int, ...]) -> float:
        ahead_s = 0.002 * max(gammas)
        verify_s = float(
            latency.verify_s(NUM_SEQUENCES, NUM_SEQUENCES + sum(gammas), is_after_drafting=True)
        )
        return expected(survival, gammas) / (ahead_s + verify_s)

    plan = plan_of(survival, latency, maker=Maker.TARGET)
    assert plan.tokens_per_s == pytest.approx(max(map(rate, ALL_GAMMAS)))


def test_drafts_of_both_are_made_one_after_the_other() -> None:
    latency = make_latency(3)
    latency.observe(own_drafts(num_sequences=1, longest=1, ahead_s=0.0015))
    survival = np.array([[[0.9, 0.8]], [[0.9, 0.8]]])
    plan = best_plan(survival, [Maker.DRAFTER, Maker.TARGET], latency, NO_PROMPTS)
    assert plan.gammas == [2, 2]
    assert plan.draft_s == pytest.approx(0.003 + float(latency.draft_s(1, 2)))


def own_drafts(*, num_sequences: int, longest: int, ahead_s: float) -> ObservedRound:
    """A round for whose next one the target has drafted."""
    return ObservedRound(
        reason=Reason.BEST, outcomes=(), num_sequences=num_sequences, num_drafted=0,
        longest_draft=0, num_tokens=num_sequences, num_committed=num_sequences, draft_s=None,
        draft_compute_s=0.0, draft_further_s=0.0, verify_s=None, verify_compute_s=0.0, router_s=0.0,
        round_s=0.01,
        num_ahead=num_sequences, longest_ahead=longest, ahead_s=ahead_s,
    )  # fmt: skip


def wait_s(gammas: tuple[int, ...], latency: Latency, num_prompt_tokens: float) -> float:
    """Seconds from the end of drafting to that of a step of prompts, which began with it."""
    draft_s = float(latency.draft_s(len(gammas), max(gammas)))
    return max(0.0, latency.prompts_s(num_prompt_tokens) - draft_s)


@pytest.mark.parametrize("seed", range(20))
def test_prompts_that_run_while_drafts_are_made_cost_what_they_take_longer(seed: int) -> None:
    survival, latency = make_survival(seed), make_latency(seed)
    plan = plan_of(survival, latency, prompts=Prompts(num_tokens=12, most=24))

    def loss_s(gammas: tuple[int, ...]) -> float:
        more = expected(survival, gammas) - NUM_SEQUENCES
        drafted_s = time_s(gammas, latency) + wait_s(gammas, latency, 12)
        return drafted_s - time_s((0,) * NUM_SEQUENCES, latency, 12) - more / plan.tokens_per_s

    assert plan.loss_s == pytest.approx(min(map(loss_s, filter(any, ALL_GAMMAS))), abs=1e-9)


def test_a_long_prompt_makes_slow_drafts_pay() -> None:
    """Two drafts take 8 ms and bring 1.7 tokens, which come in less without them; but a prompt of
    100 tokens takes longer anyway, and all but 2 ms of that wherever it is run."""
    target = [StepTime(num_sequences=1, num_tokens=t, seconds=2e-3 + 1e-4 * t) for t in (1, 256)]
    draft = [StepTime(num_sequences=1, num_tokens=1, seconds=4e-3)]
    latency = Latency(target_steps=target, draft_steps=draft)
    survival = [[0.9, 0.81]]
    assert not plan_of(survival, latency).pays
    plan = plan_of(survival, latency, prompts=Prompts(num_tokens=100, most=256))
    assert plan.pays
    assert plan.gammas == [2]
    assert worth_verifying(survival, plan, latency) == [2]


@pytest.mark.parametrize(
    ("num_waiting", "maker"), [(6, Maker.NOBODY), (40, Maker.NOBODY), (40, Maker.DRAFTER)]
)
@pytest.mark.parametrize("seed", range(20))
def test_prompts_are_not_held_up(seed: int, num_waiting: int, maker: Maker) -> None:
    """Whether all of them are run in the step, or as much as drafts leave room for."""
    survival, latency = make_survival(seed), make_latency(seed)
    plan = plan_of(survival, latency, maker=maker, prompts=Prompts(num_tokens=num_waiting, most=24))
    is_drafted = maker is Maker.DRAFTER

    def speed(num_drafts: int, before_s: float, num_early: int) -> float:
        num_own = NUM_SEQUENCES + num_drafts
        num_run = min(num_waiting, 24 - num_own)
        verify_s = latency.verify_s(NUM_SEQUENCES, num_own + num_run, is_after_drafting=True)
        return (num_early + num_run) / (before_s + float(verify_s))

    def drafted_speed(gammas: tuple[int, ...]) -> float:
        if not is_drafted:
            return speed(sum(gammas), 0.0, 0)
        draft_s = float(latency.draft_s(NUM_SEQUENCES, max(plan.gammas)))
        return speed(sum(gammas), draft_s + wait_s(tuple(plan.gammas), latency, 24), 24)

    least = speed(0, 0.0, 0) / (1.0 + DELAY_SHARE)
    if plan.loss_s < 0.0:
        assert drafted_speed(tuple(plan.gammas)) >= least * (1.0 - 1e-9)
    kept = worth_verifying(survival, plan, latency)
    if any(kept):
        assert drafted_speed(tuple(kept)) >= least * (1.0 - 1e-9)


def test_a_plan_counts_with_choosing_later() -> None:
    """Half of the drafts are sure and half hopeless: drafting pays, as only the sure are kept."""
    target = [StepTime(num_sequences=8, num_tokens=t, seconds=0.010 + 0.001 * t) for t in (8, 64)]
    draft = [StepTime(num_sequences=8, num_tokens=8, seconds=0.0005)]
    latency = Latency(target_steps=target, draft_steps=draft)
    sure, hopeless = [0.99] * 2, [0.1, 0.01]

    def plan(cases: list[list[float]]) -> Plan:
        return best_plan(np.array([cases] * 8), [Maker.DRAFTER] * 8, latency, NO_PROMPTS)

    mixed = plan([sure, hopeless])
    assert mixed.gammas == [2] * 8
    assert mixed.least_survival == 0.99
    assert mixed.loss_s < 0.0 < plan([hopeless]).loss_s


def test_a_plan_counts_with_drafters_that_stop() -> None:
    """One draft in five is sure throughout: long ones take long only then."""
    target = [StepTime(num_sequences=1, num_tokens=t, seconds=0.020) for t in (1, 32)]
    draft = [StepTime(num_sequences=1, num_tokens=1, seconds=0.002)]
    latency = Latency(target_steps=target, draft_steps=draft)
    sure, hopeless = [0.97**k for k in range(1, 17)], [0.1 * 0.01**k for k in range(16)]
    survival = np.array([[sure] + [hopeless] * 4])
    plan = best_plan(survival, [Maker.DRAFTER], latency, NO_PROMPTS)
    assert plan.gammas == [16]
    assert 0.1 < plan.least_survival <= sure[-1]


@pytest.mark.parametrize("seed", range(40))
def test_no_other_drafts_are_worth_more_of_the_targets_time(seed: int) -> None:
    survival, latency = make_survival(seed), make_latency(seed)
    plan = plan_of(survival, latency)

    def worth(gammas: tuple[int, ...]) -> float:
        verify_s = float(
            latency.verify_s(NUM_SEQUENCES, NUM_SEQUENCES + sum(gammas), is_after_drafting=True)
        )
        return expected(survival, gammas) - plan.tokens_per_s * verify_s

    kept = worth_verifying(survival, plan, latency)
    assert worth(tuple(kept)) == pytest.approx(max(map(worth, ALL_GAMMAS)))


@pytest.mark.parametrize("maker", [Maker.NOBODY, Maker.TARGET])
def test_drafts_without_a_drafter_are_verified_at_the_speed_of_plain_rounds(maker: Maker) -> None:
    """Steps take twice as long as the table says, and no round has shown how a drafter changes it:
    the second draft, of 0.35, is worth its 10 ms of the table but not 20 ms."""
    table = [StepTime(num_sequences=1, num_tokens=t, seconds=0.01 + 0.01 * t) for t in (1, 8)]
    latency = Latency(target_steps=table)
    for _ in range(50):
        latency.observe(plain_round(num_tokens=1, step_s=0.040))
    survival = [[0.9, 0.35, 0.01]]
    plan = plan_of(survival, latency, maker=maker)
    assert plan.gammas == [1]
    assert worth_verifying(survival, plan, latency) == [1]


def plain_round(*, num_tokens: int, step_s: float) -> ObservedRound:
    """A clean round of one sequence that no drafter was asked for."""
    return ObservedRound(
        reason=Reason.BEST, outcomes=(), num_sequences=1, num_drafted=0, longest_draft=0,
        num_tokens=num_tokens, num_committed=1, draft_s=None, draft_compute_s=0.0,
        draft_further_s=0.0, verify_s=step_s, verify_compute_s=step_s, router_s=0.0, round_s=step_s,
    )  # fmt: skip


def test_nothing_to_draft_is_no_plan_to_draft() -> None:
    latency = make_latency(0)
    for shape in ((2, 1, 4), (2, 1, 0)):
        plan = best_plan(
            np.zeros(shape), [Maker.DRAFTER] * 2, latency, Prompts(num_tokens=9, most=64)
        )
        assert not any(plan.gammas)
        assert worth_verifying([[], []], plan, latency) == [0, 0]
