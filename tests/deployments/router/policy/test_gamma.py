"""The gamma controller against simulated rounds, whose acceptance and costs are known."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

import pytest

from deployments.router.policy.controller import DynamicGamma
from deployments.router.policy.gamma import (
    Candidate,
    Maker,
    ObservedRound,
    Outcome,
    Reason,
)
from tests.deployments.router.policy.machines import (
    BLOCKS,
    CPU,
    DISTANT,
    FIXED,
    FULL,
    GPU,
    MACHINES,
    NODES,
    REMOTE,
    SMALL,
    WIDE,
    Machine,
    Reading,
    StalledAtFirst,
    Stalling,
)
from tests.deployments.router.policy.simulation import simulate
from tests.deployments.simulated_drafts import Chance, varied

DRAFTS: list[tuple[float, Chance | None]] = [
    (0.05, varied), (0.4, None), (0.7, varied), (0.9, None),
    (0.05, None), (0.4, varied), (0.7, None), (0.9, varied),
]  # fmt: skip
"""How often drafts are accepted, and whether some are surer than others. Each machine has two of
these in its turn; `make fuzz` tries all of them with each."""


@pytest.mark.parametrize("num_sequences", [1, 4])
@pytest.mark.parametrize("machine", MACHINES)
def test_it_is_as_good_as_the_best_fixed_gamma(
    machine: str, num_sequences: int, has_all_combinations: bool
) -> None:
    """One run with the drafts in turn; `make fuzz` takes the mean of two with each of them, since
    the noise of the first rounds may lead astray for long."""
    turn = [*MACHINES].index(machine) + 3 * (num_sequences > 1)
    for alpha, chance in DRAFTS if has_all_combinations else [DRAFTS[turn % len(DRAFTS)]]:
        alphas, simulated = [alpha] * num_sequences, MACHINES[machine]
        best = max(simulated.tokens_per_s(gamma, alphas) for gamma in FIXED)
        num_runs = 2 if has_all_combinations else 1
        assert mean_speed(simulated, alphas, chance, num_runs=num_runs) > 0.955 * best


@pytest.mark.covering(
    alpha_and_chance={
        "0.05-varied": (0.05, varied),
        "0.5-even": (0.5, None),
        "0.5-varied": (0.5, varied),
        "0.6-varied": (0.6, varied),
    },
    num_sequences=[1, 4],
)
def test_what_plain_rounds_take_is_not_taken_for_the_step(
    alpha_and_chance: tuple[float, Chance | None], num_sequences: int, has_all_combinations: bool
) -> None:
    """Else drafts would seem dearer than they are, and a round without them cheaper."""
    alpha, chance = alpha_and_chance
    alphas = [alpha] * num_sequences
    best = max(SMALL.tokens_per_s(gamma, alphas) for gamma in FIXED)
    num_runs = 3 if has_all_combinations else 1
    assert mean_speed(SMALL, alphas, chance, num_runs=num_runs) > 0.95 * best


@pytest.mark.parametrize("num_sequences", [1, 8])
@pytest.mark.parametrize("has_stalls", [False, True])
def test_drafts_save_what_the_router_and_others_take_of_each_round(
    num_sequences: int, has_stalls: bool
) -> None:
    """Steps alone would be over sooner without drafts, but rounds are fewer with them."""
    routed, alphas = replace(SMALL, plain_more=0.0, router=0.6), [0.7] * num_sequences
    machine = Stalling.like(routed) if has_stalls else routed
    best = max(machine.tokens_per_s(gamma, alphas) for gamma in FIXED)
    run = simulate(machine.controller(), machine, lambda _: alphas, 1500)
    assert run.tokens_per_s(300) > 0.95 * best


@pytest.mark.parametrize("num_sequences", [1, 8])
def test_what_a_drafter_reads_first_is_no_part_of_every_draft(num_sequences: int) -> None:
    """One draft each never pays, which says nothing of four."""
    machine = replace(SMALL, plain_more=0.0, first_draft=1.8, router=0.6)
    alphas = [0.8] * num_sequences
    best = max(machine.tokens_per_s(gamma, alphas) for gamma in FIXED)
    run = simulate(machine.controller(), machine, lambda _: alphas, 1000)
    assert run.tokens_per_s(300) > 0.95 * best


@pytest.mark.parametrize(
    "machine", [SMALL, CPU, REMOTE, FULL], ids=["small", "cpu", "remote", "full"]
)
@pytest.mark.parametrize("num_sequences", [1, 4])
def test_plain_rounds_do_not_seem_dear_for_long_because_the_first_were_stalls(
    machine: Machine, num_sequences: int
) -> None:
    """Drafts do not pay, and would be made for ever, as if nothing were learnt of plain rounds."""
    alphas = [0.05] * num_sequences
    runs = [
        simulate(
            machine.controller(), StalledAtFirst.like(machine), lambda _: alphas, 400,
            chance=varied, seed=seed,
        )
        for seed in range(3)
    ]  # fmt: skip
    speed = mean(run.tokens_per_s(30) for run in runs)
    assert speed > 0.84 * machine.tokens_per_s(0, alphas)


@pytest.mark.parametrize("machine", [SMALL, CPU, REMOTE], ids=["small", "cpu", "remote"])
@pytest.mark.parametrize("num_sequences", [1, 4])
def test_drafts_do_not_seem_dear_for_long_because_the_first_were_stalls(
    machine: Machine, num_sequences: int
) -> None:
    alphas = [0.7] * num_sequences
    stalled = StalledAtFirst.like(machine, num_stalls=5, are_drafted=True)
    run = simulate(machine.controller(), stalled, lambda _: alphas, 300, chance=varied)
    best = max(machine.tokens_per_s(gamma, alphas) for gamma in FIXED)
    assert run.tokens_per_s(60) > 0.95 * best


@pytest.mark.covering(
    alpha=[0.05, 0.4],
    num_sequences=[1, 4],
    machine={"small": SMALL, "wide": WIDE, "remote": REMOTE, "distant": DISTANT, "gpu": GPU},
)
def test_texts_that_were_hard_are_soon_forgotten(
    alpha: float, num_sequences: int, machine: Machine
) -> None:
    """Drafts that are not made, like second ones where one each seems enough, tell nothing."""
    alphas = [0.85] * num_sequences
    controller, fresh = machine.controller(), machine.controller()
    simulate(controller, machine, lambda _: [alpha] * num_sequences, 400, chance=varied)
    later, anew = (
        simulate(each, machine, lambda _: alphas, 450, chance=varied)
        for each in (controller, fresh)
    )
    assert later.tokens_per_s(200) > 0.93 * anew.tokens_per_s(200)


@pytest.mark.parametrize("machine", [BLOCKS, NODES], ids=["blocks", "nodes"])
def test_second_drafts_that_have_become_good_are_found_out(machine: Machine) -> None:
    """While one draft each seems the best, nothing is seen of second ones."""
    for seed in range(3):
        run = simulate(
            machine.controller(), machine, lambda index: [0.3 if index < 400 else 0.9], 1000,
            seed=seed, chance=varied,
        )  # fmt: skip
        assert mean(gamma for (gamma,) in run.gammas[300:400]) < 2
        assert mean(gamma for (gamma,) in run.gammas[900:]) > 4


@pytest.mark.parametrize("num_sequences", [1, 4])
def test_what_drafters_read_after_many_plain_rounds_makes_drafts_no_dearer(
    num_sequences: int,
) -> None:
    """A try comes after such rounds, and tells what drafts would take in a row all the same."""
    controller, machine = SMALL.controller(), Reading.like(SMALL)
    simulate(controller, machine, lambda _: [0.05] * num_sequences, 400, chance=varied)
    alphas = [0.6] * num_sequences
    run = simulate(controller, machine, lambda _: alphas, 800, chance=varied)
    best = max(SMALL.tokens_per_s(gamma, alphas) for gamma in FIXED)
    assert run.tokens_per_s(300) > 0.97 * best


@pytest.mark.parametrize("num_sequences", [1, 4])
@pytest.mark.parametrize("alpha", [0.1, 0.3])
def test_drafts_that_do_not_pay_cost_little_where_drafters_have_much_to_read(
    alpha: float, num_sequences: int
) -> None:
    """As the prompts of short texts, which take ten rounds or more."""
    machine, alphas = Reading.like(SMALL, num_drafts=130), [alpha] * num_sequences
    run = simulate(machine.controller(), machine, lambda _: alphas, 1500, chance=varied)
    assert run.tokens_per_s(300) > 0.97 * SMALL.tokens_per_s(0, alphas)


def mean_speed(
    machine: Machine, alphas: Sequence[float], chance: Chance | None, *, num_runs: int
) -> float:
    """The tokens per second of runs of 700 rounds each."""
    return mean(
        simulate(
            machine.controller(), machine, lambda _: alphas, 700, chance=chance, seed=seed
        ).tokens_per_s()
        for seed in range(num_runs)
    )


class TestDynamicGamma:
    def test_sure_drafts_of_one_sequence_go_far(self) -> None:
        """A step of the drafter costs nothing where it has stopped before."""
        machine = Machine(hop=4, draft_step=1, verify=28, verify_token=0.5)

        def speed(seed: int) -> float:
            run = simulate(
                machine.controller(), machine, lambda _: [0.85], 700, seed=seed, chance=varied,
                max_gamma=16,
            )  # fmt: skip
            return run.tokens_per_s(200)

        best = max(machine.tokens_per_s(gamma, [0.85]) for gamma in (6, 8, 10, 12))
        own = [speed(seed) for seed in range(3)]
        assert mean(own) > 1.075 * best

    def test_with_many_sequences_only_sure_drafts_are_verified(self) -> None:
        machine = Machine(hop=2, draft_step=1, verify=20, verify_token=1.5)
        alphas = [0.75] * 16
        run = simulate(machine.controller(), machine, lambda _: alphas, 500, chance=varied)
        best = max(machine.tokens_per_s(gamma, alphas) for gamma in FIXED)
        assert run.tokens_per_s() > 1.05 * best

    def test_it_beats_every_fixed_gamma_where_sequences_differ(self) -> None:
        alphas = [0.95] * 4 + [0.05] * 4
        machine = Machine(hop=2, draft_step=1, verify=20, verify_token=2)
        run = simulate(machine.controller(), machine, lambda _: alphas, 1000)
        best = max(machine.tokens_per_s(gamma, alphas) for gamma in FIXED)
        assert run.tokens_per_s() > 1.05 * best
        settled = run.gammas[500:]
        means = [sum(gammas[i] for gammas in settled) / len(settled) for i in range(8)]
        assert min(means[:4]) > 4
        assert max(means[4:]) < 1

    def test_it_follows_traffic_that_changes_within_100_rounds(self) -> None:
        """In the mean, since 300 rounds are few and luck shows; no run is far from it."""

        def alphas(index: int) -> list[float]:
            return [0.03 if 300 <= index < 700 else 0.85]

        runs = [simulate(CPU.controller(), CPU, alphas, 1100, seed=seed) for seed in range(3)]

        def speeds(start: int, end: int) -> list[float]:
            return [run.tokens_per_s(start, end) for run in runs]

        plain, easy = CPU.tokens_per_s(0, [0.03]), CPU.tokens_per_s(6, [0.85])
        assert mean(speeds(400, 700)) > 0.95 * plain
        assert min(speeds(400, 700)) > 0.94 * plain
        assert min(speeds(100, 300)) > easy
        assert min(speeds(800, 1100)) > easy

    def test_greedy_drafts_do_not_wait_for_what_became_of_sampled_ones(self) -> None:
        """Sampled ones did not pay for long, and the drafter was too sure of them."""

        def speed(seed: int) -> float:
            controller = CPU.controller()
            sampled = simulate(
                controller, CPU, lambda _: [0.03], 400, seed=seed, chance=varied,
                is_sampled=lambda _: True,
            )  # fmt: skip
            assert sum(map(any, sampled.gammas[-100:])) < 50
            controller.forget("0")
            greedy = simulate(controller, CPU, lambda _: [0.85], 60, seed=seed, chance=varied)
            return greedy.tokens_per_s()

        best = max(CPU.tokens_per_s(gamma, [0.85]) for gamma in FIXED)
        assert mean(speed(seed) for seed in range(5)) > 0.96 * best

    def test_drafts_that_do_not_pay_are_tried_rarely(self) -> None:
        run = simulate(CPU.controller(), CPU, lambda _: [0.0] * 4, 1000)
        drafted = [gammas for gammas in run.gammas[200:] if any(gammas)]
        assert drafted
        assert sum(run.times_s[200:]) < 1.02 * 800 * CPU.step_s(4)

    @pytest.mark.parametrize("seed", range(2))
    def test_drafts_that_have_become_cheap_are_made_again(self, seed: int) -> None:
        """A probe, of one sequence, would not show it."""
        dear = Machine(hop=2, draft_step=16, verify=20, verify_token=0.1)
        cheap = Machine(hop=1, draft_step=0.5, verify=20, verify_token=0.1)
        controller, alphas = dear.controller(), [0.5] * 8
        before = simulate(controller, dear, lambda _: alphas, 200, seed=seed, chance=varied)
        after = simulate(controller, cheap, lambda _: alphas, 700, seed=seed, chance=varied)
        assert sum(map(any, before.gammas[-20:])) <= 2
        assert after.tokens_per_s(300) > max(cheap.tokens_per_s(gamma, alphas) for gamma in FIXED)

    def test_nothing_is_drafted_where_nothing_may_be(self) -> None:
        controller = CPU.controller()
        simulate(controller, CPU, lambda _: [0.9, 0.9], 100)
        candidates = [Candidate(seq_id="0", max_gamma=0), Candidate(seq_id="1", max_gamma=3)]
        first, second = controller.choose(candidates, num_prefill_tokens=0).gammas
        assert first == 0
        assert 0 < second <= 3
        assert controller.choose(
            [Candidate(seq_id="0", max_gamma=0)], num_prefill_tokens=0
        ).gammas == [0]
        assert controller.choose([], num_prefill_tokens=0).gammas == []


def test_new_step_times_are_believed_at_once() -> None:
    """As those of a compiled forward, in place of a drafter's that was too slow."""
    controller, alphas = DynamicGamma(**CPU.measured()), [0.7] * 4
    slow = replace(CPU, draft_step=40)
    before = simulate(controller, slow, lambda _: alphas, 200, chance=varied)
    controller.use_steps(**CPU.measured())
    after = simulate(controller, CPU, lambda _: alphas, 20, chance=varied)
    assert sum(map(any, before.gammas[-50:])) < 5
    assert all(map(any, after.gammas[2:]))


def test_drafts_in_hand_are_verified_where_asking_for_drafts_would_not_pay() -> None:
    controller = DynamicGamma(**replace(CPU, draft_step=100).measured())
    candidates = [
        Candidate(seq_id="free", max_gamma=4, source="prompt_lookup", maker=Maker.NOBODY),
        Candidate(seq_id="remote", max_gamma=4),
    ]
    decisions = [controller.choose(candidates, num_prefill_tokens=0) for _ in range(3)]
    assert decisions[-1].gammas == [4, 0]


@pytest.mark.parametrize(("share", "pays"), [(0.05, True), (1.0, False)])
def test_the_target_drafts_itself_where_its_first_layers_are_few(share: float, pays: bool) -> None:
    """For a share of a whole step's time each, drafts that are right with 0.7."""
    controller = DynamicGamma(**GPU.measured())
    whole_s = controller._latency.verify_s(1, 1, is_after_drafting=False)
    outcome = Outcome(
        seq_id="s", source="early_exit", num_draft_tokens=4, num_tested=3, num_accepted=2,
        num_committed=3,
    )  # fmt: skip
    observed = ObservedRound(
        reason=Reason.BEST, outcomes=(outcome,), num_sequences=1, num_drafted=0, longest_draft=0,
        num_tokens=5, num_committed=3, draft_s=None, draft_compute_s=0.0, draft_further_s=0.0,
        verify_s=None, verify_compute_s=0.0, router_s=0.0, round_s=0.1,
        num_ahead=1, longest_ahead=4, ahead_s=4 * share * float(whole_s),
    )  # fmt: skip
    candidate = Candidate(seq_id="s", max_gamma=4, source="early_exit", maker=Maker.TARGET)
    for _ in range(30):
        controller.observe(observed)
    decisions = [controller.choose([candidate], num_prefill_tokens=0) for _ in range(3)]
    assert (decisions[-1].reason is Reason.BEST) is pays
