"""The gamma controller against simulated rounds, whose acceptance and costs are known."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import pytest

from deployments.router.policy import dynamic_gamma
from deployments.router.policy.dynamic_gamma import (
    LONGEST_PAUSE,
    LONGEST_PROBE,
    NUM_UNSETTLED,
    SHORTEST_PAUSE,
    THINK_EVERY,
    DynamicGamma,
)
from deployments.router.policy.gamma import (
    Candidate,
    Decision,
    Drafted,
    FixedGamma,
    GammaController,
    ObservedRound,
    Reason,
)
from deployments.router.policy.plan import Plan, best_plan
from tests.deployments.simulated_drafts import Chance, confidence, even, judge, varied

MAX_GAMMA = 8
FIXED = (0, 1, 2, 4, 6, 8)
"""What a dynamic gamma is compared with."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Milliseconds of a round: drafting to a depth, verifying a number of tokens."""

    hop: float
    draft_step: float
    verify: float
    verify_token: float
    verify_wide: float = 0.0
    """More than 8 tokens cost this much more, as with matrix kernels that work in blocks."""
    plain_more: float = 0.0
    """A round without drafts costs this much more, as texts are handed out during its step."""

    def draft_s(self, longest: int) -> float:
        return (self.hop + self.draft_step * longest) / 1e3 if longest else 0.0

    def verify_s(self, num_tokens: int) -> float:
        is_wide = num_tokens > 8
        return (self.verify + self.verify_token * num_tokens + self.verify_wide * is_wide) / 1e3

    def round_s(self, longest: int, num_tokens: int) -> tuple[float, float]:
        """Of drafting and of verifying."""
        more_s = 0.0 if longest else self.plain_more / 1e3
        return self.draft_s(longest), self.verify_s(num_tokens) + more_s

    def tokens_per_s(self, gamma: int, alphas: Sequence[float], *, num_beside: int = 0) -> float:
        """To be expected of rounds in which every sequence has that many drafts."""
        num_tokens = num_beside + len(alphas) * (gamma + 1)
        num_committed = sum(alpha**i for alpha in alphas for i in range(gamma + 1))
        return num_committed / sum(self.round_s(gamma, num_tokens))


# one stream on a CPU, a GPU with a slow network, a machine whose batch is full already
CPU = Machine(hop=4, draft_step=1.5, verify=38, verify_token=1)
REMOTE = Machine(hop=8, draft_step=1, verify=25, verify_token=0.05)
FULL = Machine(hop=4, draft_step=1.5, verify=10, verify_token=8)
BLOCKS = Machine(hop=5, draft_step=2, verify=46, verify_token=0.8, verify_wide=14)
# so small a model that it shows when texts are handed out
SMALL = Machine(hop=1.2, draft_step=0.3, verify=1.4, verify_token=0.02, plain_more=0.7)
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
    beside: Callable[[Run], int] = lambda _: 0,
    max_gamma: int = MAX_GAMMA,
    is_sampled: Callable[[int], bool] = lambda _: False,
) -> Run:
    """`alphas(round)` are those of the sequences of a round; noise of 10 % on every time.

    After the rounds so far, `beside(run)` tokens of others are run in the same step.

    With a `chance`, drafts have one each, and the drafter says how sure it is; without, it is
    silent, and drafts as far as it is asked to. Of sampled tokens, those of a sequence `i` with
    `is_sampled(i)`, it is surer than it should be.
    """

    def sureness(i: int, chance: float) -> float:
        return confidence(chance, 1.5) if is_sampled(i) else confidence(chance)

    rng = random.Random(seed)
    run = Run([], [], [])
    observed: ObservedRound | None = None
    for index in range(num_rounds):
        of_round = alphas(index)
        candidates = [
            Candidate(seq_id=str(i), max_gamma=max_gamma, is_sampled=is_sampled(i))
            for i in range(len(of_round))
        ]
        num_beside = beside(run)
        decision = controller.choose(candidates, num_beside=num_beside)
        chances: dict[int, list[float]] = {}
        for i, (gamma, stop_below) in enumerate(
            zip(decision.gammas, decision.stop_below, strict=True)
        ):
            product = 1.0
            while len(chances.get(i, ())) < gamma and product >= stop_below:
                chances.setdefault(i, []).append((chance or even)(rng, of_round[i]))
                product *= sureness(i, chances[i][-1]) if chance else 1.0
        drafted = [
            Drafted(
                seq_id=str(i),
                num_draft_tokens=len(of_sequence),
                confidences=tuple(sureness(i, c) for c in of_sequence) if chance else (),
                is_sampled=is_sampled(i),
            )
            for i, of_sequence in chances.items()
        ]
        num_others = num_beside + len(candidates) - len(drafted)
        kept = controller.keep(decision, drafted, num_others=num_others)
        if observed is not None:  # told late, as of rounds whose drafts are in hand already
            controller.observe(observed)
        controller.prepare(candidates, num_beside=num_beside)
        outcomes = tuple(
            judge(
                rng, of_sequence.seq_id, chances[int(of_sequence.seq_id)][:num_kept],
                confidences=of_sequence.confidences[:num_kept],
                is_sampled=of_sequence.is_sampled,
            )
            for of_sequence, num_kept in zip(drafted, kept, strict=True)
            if num_kept > 0
        )  # fmt: skip
        num_tokens = num_beside + len(of_round) + sum(kept)
        longest = max(map(len, chances.values()), default=0)
        draft_s, verify_s = machine.round_s(longest, num_tokens)
        observed = ObservedRound(
            reason=decision.reason,
            outcomes=outcomes,
            num_sequences=len(of_round),
            num_drafted=len(drafted),
            longest_draft=longest,
            num_tokens=num_tokens,
            num_committed=len(of_round) + sum(outcome.num_accepted for outcome in outcomes),
            is_draft_typical=True,
            is_verify_typical=True,
            is_disturbed=False,
            is_overlapped=False,
            is_after_overlap=False,
            draft_s=draft_s * rng.uniform(0.9, 1.1),
            verify_s=verify_s * rng.uniform(0.9, 1.1),
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


class IdleRounds:
    """Of a controller that has found that drafts do not pay; its probes are never answered."""

    def __init__(self) -> None:
        self.controller = DynamicGamma()
        simulate(self.controller, CPU, lambda _: [0.0], 400)  # not long after a trial
        self.controller.forget("0")

    def gammas(self, *seq_ids: str, catching_up: str | None = None) -> list[int]:
        """Of a round of these sequences."""
        decision = self.controller.choose(
            [
                Candidate(seq_id=seq_id, max_gamma=MAX_GAMMA, is_catching_up=seq_id == catching_up)
                for seq_id in seq_ids
            ],
            num_beside=0,
        )
        observed = ObservedRound(
            reason=decision.reason,
            outcomes=(), num_sequences=len(seq_ids), num_drafted=0, longest_draft=0,
            num_tokens=1, num_committed=1,
            is_draft_typical=True, is_verify_typical=True, is_disturbed=False,
            is_overlapped=False, is_after_overlap=False, draft_s=0.0, verify_s=CPU.verify_s(1),
        )  # fmt: skip
        self.controller.observe(observed)
        return decision.gammas

    def until_probed(self, seq_id: str) -> None:
        assert any(self.gammas(seq_id) == [1] for _ in range(LONGEST_PAUSE + 1))


class TestDynamicGamma:
    @pytest.mark.parametrize("chance", [None, varied])
    @pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
    @pytest.mark.parametrize("num_sequences", [1, 8])
    @pytest.mark.parametrize("alpha", [0.05, 0.4, 0.7, 0.9])
    def test_it_is_as_good_as_the_best_fixed_gamma(
        self, alpha: float, num_sequences: int, machine: Machine, chance: Chance | None
    ) -> None:
        """In the mean of two runs, since the noise of the first rounds may lead astray for long."""
        alphas = [alpha] * num_sequences
        runs = [
            simulate(DynamicGamma(), machine, lambda _: alphas, 700, chance=chance, seed=seed)
            for seed in range(2)
        ]
        dynamic = sum(run.tokens_per_s() for run in runs) / len(runs)
        assert dynamic > 0.955 * max(machine.tokens_per_s(gamma, alphas) for gamma in FIXED)

    @pytest.mark.parametrize("num_sequences", [1, 8])
    @pytest.mark.parametrize(
        ("alpha", "chance"), [(0.05, varied), (0.5, None), (0.5, varied), (0.6, varied)]
    )
    def test_what_plain_rounds_take_is_not_taken_for_the_step(
        self, alpha: float, chance: Chance | None, num_sequences: int
    ) -> None:
        """Else drafts would seem dearer than they are, and a round without them cheaper."""
        alphas = [alpha] * num_sequences
        runs = [
            simulate(DynamicGamma(), SMALL, lambda _: alphas, 700, chance=chance, seed=seed)
            for seed in range(3)
        ]
        best = max(SMALL.tokens_per_s(gamma, alphas) for gamma in FIXED)
        assert mean(run.tokens_per_s() for run in runs) > 0.95 * best

    @pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
    @pytest.mark.parametrize("num_sequences", [1, 4, 16])
    def test_a_long_prompt_beside_makes_drafts_cheap(
        self, num_sequences: int, machine: Machine
    ) -> None:
        """Steps are long anyway, so one had better bring many tokens."""

        alphas = [0.8] * num_sequences
        run = simulate(
            DynamicGamma(), machine, lambda _: alphas, 600, chance=varied,
            beside=lambda run: 200 if len(run.tokens) >= 300 else 0,
        )  # fmt: skip
        best = max(machine.tokens_per_s(gamma, alphas, num_beside=200) for gamma in FIXED)
        assert run.tokens_per_s(310) > 0.96 * best

    @pytest.mark.parametrize(
        ("num_sequences", "prompt_len", "alpha", "least"),
        [(64, 120, 0.75, 0.99), (32, 330, 0.75, 1.01), (32, 330, 0.5, 0.99)],
    )
    def test_prompts_that_come_with_texts_make_drafts_no_cheaper(
        self, num_sequences: int, prompt_len: int, alpha: float, least: float
    ) -> None:
        """They have to be run for every text, so drafts save nothing of them, however long."""
        machine = Machine(hop=3, draft_step=0.8, verify=14, verify_token=0.7)

        def speed(controller: GammaController, seed: int) -> float:
            num_texts = 0

            def beside(run: Run) -> int:
                nonlocal num_texts
                num_due = int(sum(run.tokens) / 128) - num_texts
                for text in range(num_texts, num_texts + num_due):
                    controller.forget(str(text % num_sequences))
                num_texts += num_due
                return prompt_len * num_due

            run = simulate(
                controller, machine, lambda _: [alpha] * num_sequences, 1000, seed=seed,
                chance=varied, beside=beside,
            )  # fmt: skip
            return run.tokens_per_s(200)

        best = [max(speed(FixedGamma(gamma), seed) for gamma in (0, 1, 2)) for seed in range(2)]
        assert sum(speed(DynamicGamma(), seed) for seed in range(2)) > least * sum(best)

    def test_drafts_that_do_not_pay_beside_a_prompt_are_made_again_after_it(self) -> None:
        class Narrow(Machine):
            def verify_s(self, num_tokens: int) -> float:
                return super().verify_s(num_tokens) + 0.003 * max(0, num_tokens - 32)

        run = simulate(
            DynamicGamma(), Narrow(hop=2, draft_step=1, verify=24, verify_token=0.1),
            lambda _: [0.5] * 8, 500, chance=varied,
            beside=lambda run: 60 if len(run.tokens) % 10 == 0 else 0,
        )  # fmt: skip
        beside = [any(gammas) for gammas in run.gammas[200::10]]
        after = [any(gammas) for gammas in run.gammas[201::10]]
        assert sum(beside) < 0.1 * len(beside)
        assert all(after)

    @pytest.mark.parametrize("seed", range(5))
    @pytest.mark.parametrize("last", range(80, 84))
    def test_a_prompt_is_noticed_at_once_where_drafts_did_not_pay(
        self, last: int, seed: int
    ) -> None:
        """One more token made the step a wide one, which it is now anyway."""
        run = simulate(
            DynamicGamma(), BLOCKS, lambda _: [0.3] * 8, last + 1, seed=seed, chance=varied,
            beside=lambda run: 200 if len(run.tokens) == last else 0,
        )  # fmt: skip
        assert all(sum(gammas) <= 1 for gammas in run.gammas[-11:-1])  # a probe's
        assert sum(run.gammas[-1]) > 1

    def test_drafters_may_stop_in_varied_rounds_too(self) -> None:
        """A long draft of all sequences would take many times what a round does."""
        decisions: list[Decision] = []

        class Recorded(DynamicGamma):
            def choose(self, candidates: Sequence[Candidate], *, num_beside: int) -> Decision:
                decisions.append(super().choose(candidates, num_beside=num_beside))
                return decisions[-1]

        simulate(Recorded(), CPU, lambda _: [0.7] * 8, 100, chance=varied)
        of_varied = [d.stop_below for d in decisions if d.reason is Reason.VARIED]
        assert of_varied
        assert min(least for of_round in of_varied for least in of_round) > 0

    @pytest.mark.parametrize("seed", range(3))
    def test_sure_drafts_of_one_sequence_go_far(self, seed: int) -> None:
        """A step of the drafter costs nothing where it has stopped before."""
        machine = Machine(hop=4, draft_step=1, verify=28, verify_token=0.5)

        def speed(controller: GammaController, num_rounds: int) -> float:
            run = simulate(
                controller, machine, lambda _: [0.85], num_rounds, seed=seed, chance=varied,
                max_gamma=16,
            )  # fmt: skip
            return run.tokens_per_s(200)

        best = max(speed(FixedGamma(gamma), 2000) for gamma in (6, 8, 10, 12))
        assert speed(DynamicGamma(), 1000) > 1.075 * best

    def test_with_many_sequences_only_sure_drafts_are_verified(self) -> None:
        machine = Machine(hop=2, draft_step=1, verify=20, verify_token=1.5)
        alphas = [0.75] * 16
        run = simulate(DynamicGamma(), machine, lambda _: alphas, 500, chance=varied)
        best = max(machine.tokens_per_s(gamma, alphas) for gamma in FIXED)
        assert run.tokens_per_s() > 1.05 * best

    def test_it_beats_every_fixed_gamma_where_sequences_differ(self) -> None:
        alphas = [0.95] * 4 + [0.05] * 4
        machine = Machine(hop=2, draft_step=1, verify=20, verify_token=2)
        run = simulate(DynamicGamma(), machine, lambda _: alphas, 1000)
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

        runs = [simulate(DynamicGamma(), CPU, alphas, 1100, seed=seed) for seed in range(5)]

        def speeds(start: int, end: int) -> list[float]:
            return [run.tokens_per_s(start, end) for run in runs]

        plain = simulate(FixedGamma(0), CPU, lambda _: [0.5], 400).tokens_per_s()
        easy = simulate(FixedGamma(6), CPU, lambda _: [0.85], 4000).tokens_per_s()
        assert mean(speeds(400, 700)) > 0.95 * plain
        assert min(speeds(400, 700)) > 0.94 * plain
        assert min(speeds(100, 300)) > easy
        assert min(speeds(800, 1100)) > easy

    @pytest.mark.parametrize(("num_disturbed", "is_learnt"), [(8, False), (9, True)])
    @pytest.mark.parametrize("num_prompts", [0, 1, 8])
    def test_rounds_tell_no_costs_while_requests_come_and_go(
        self, num_disturbed: int, is_learnt: bool, num_prompts: int
    ) -> None:
        """Unless they always do. Steps are longer then, and not those of all amounts alike.

        Rounds of prompts alone, which come before each, tell no costs anyway and do not count.
        """
        controller, candidates = DynamicGamma(), [Candidate(seq_id="0", max_gamma=MAX_GAMMA)]
        simulate(controller, CPU, lambda _: [0.8], 200, chance=varied)

        def expected() -> float:
            """Tokens per second, by a new thought."""
            decisions = [
                controller.choose(candidates, num_beside=0) for _ in range(2 * THINK_EVERY)
            ]
            rates = [d.tokens_per_s for d in decisions if d.reason is Reason.BEST]
            assert rates[-1] is not None
            return rates[-1]

        before = expected()
        for _ in range(num_disturbed):
            observed = ObservedRound(
                reason=Reason.BEST,
                outcomes=(), num_sequences=1, num_drafted=0, longest_draft=0,
                num_tokens=5, num_committed=5,
                is_draft_typical=True, is_verify_typical=True, is_disturbed=True,
                is_overlapped=False, is_after_overlap=False,
                draft_s=0.0, verify_s=1.3 * CPU.verify_s(5),
            )  # fmt: skip
            for _ in range(num_prompts):
                controller.observe(replace(observed, is_verify_typical=False))
            controller.observe(observed)
        assert (expected() < before) == is_learnt

    def test_rounds_in_which_little_is_new_are_not_thought_about(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Thinking takes the processor from the steps."""
        num_thoughts = 0

        def counted(*args: Any, **options: Any) -> Plan:
            nonlocal num_thoughts
            num_thoughts += 1
            return best_plan(*args, **options)

        monkeypatch.setattr(dynamic_gamma, "best_plan", counted)
        run = simulate(DynamicGamma(), CPU, lambda _: [0.8] * 4, 464, chance=varied)
        assert num_thoughts <= NUM_UNSETTLED + 400 / THINK_EVERY + 10
        assert all(map(any, run.gammas[-400:]))

    def test_greedy_drafts_do_not_wait_for_what_became_of_sampled_ones(self) -> None:
        """Sampled ones did not pay for long, and the drafter was too sure of them."""

        def speed(seed: int) -> float:
            controller = DynamicGamma()
            sampled = simulate(
                controller, CPU, lambda _: [0.1], 400, seed=seed, chance=varied,
                is_sampled=lambda _: True,
            )  # fmt: skip
            assert sum(map(any, sampled.gammas[-100:])) < 20
            controller.forget("0")
            greedy = simulate(controller, CPU, lambda _: [0.85], 60, seed=seed, chance=varied)
            return greedy.tokens_per_s()

        best = max(CPU.tokens_per_s(gamma, [0.85]) for gamma in FIXED)
        assert mean(speed(seed) for seed in range(8)) > 0.96 * best

    def test_drafts_that_do_not_pay_are_tried_rarely(self) -> None:
        run = simulate(DynamicGamma(), CPU, lambda _: [0.0] * 4, 1000)
        drafted = [gammas for gammas in run.gammas[200:] if any(gammas)]
        assert 0 < len(drafted) <= 800 / SHORTEST_PAUSE + 1
        assert all(sum(gamma > 0 for gamma in gammas) == 1 for gammas in drafted)

    @pytest.mark.parametrize("seed", range(2))
    def test_drafts_that_have_become_cheap_are_made_again(self, seed: int) -> None:
        """A probe, of one sequence, would not show it."""
        dear = Machine(hop=2, draft_step=16, verify=20, verify_token=0.1)
        cheap = Machine(hop=1, draft_step=0.5, verify=20, verify_token=0.1)
        controller, alphas = DynamicGamma(), [0.5] * 8
        before = simulate(controller, dear, lambda _: alphas, 200, seed=seed, chance=varied)
        after = simulate(controller, cheap, lambda _: alphas, 700, seed=seed, chance=varied)
        assert not any(map(any, before.gammas[-20:]))
        assert after.tokens_per_s(300) > max(cheap.tokens_per_s(gamma, alphas) for gamma in FIXED)

    def test_a_probe_waits_for_a_drafter_that_catches_up(self) -> None:
        rounds = IdleRounds()
        rounds.until_probed("0")
        for _ in range(5 * LONGEST_PROBE):
            assert rounds.gammas("0", catching_up="0") == [1]
        # it has caught up, and still brings nothing
        after = [rounds.gammas("0") for _ in range(LONGEST_PROBE + SHORTEST_PAUSE - 1)]
        num_asked = sum(gammas == [1] for gammas in after)
        assert 0 < num_asked < LONGEST_PROBE
        assert after == [[1]] * num_asked + [[0]] * (len(after) - num_asked)

    def test_a_probe_goes_on_through_rounds_of_others(self) -> None:
        rounds = IdleRounds()
        rounds.until_probed("0")
        assert rounds.gammas("1") == [0]
        assert rounds.gammas("1", "0") == [0, 1]

    def test_a_probe_of_which_nothing_was_learnt_is_made_up_for(self) -> None:
        """Else the drafters of short texts, caught up with too late, would never be tried."""
        rounds = IdleRounds()
        rounds.until_probed("0")
        rounds.controller.forget("0")
        assert rounds.gammas("1") == [1]

    def test_a_probe_whose_round_is_lost_is_not_the_last(self) -> None:
        rounds = IdleRounds()
        rounds.until_probed("0")
        controller, candidates = rounds.controller, [Candidate(seq_id="0", max_gamma=MAX_GAMMA)]
        assert controller.choose(candidates, num_beside=0).gammas == [
            1
        ]  # of a target that dies: not observed
        later = [rounds.gammas("0") for _ in range(LONGEST_PROBE + 2 * LONGEST_PAUSE)]
        assert [1] in later

    def test_nothing_is_drafted_where_nothing_may_be(self) -> None:
        controller = DynamicGamma()
        simulate(controller, CPU, lambda _: [0.9, 0.9], 100)
        candidates = [Candidate(seq_id="0", max_gamma=0), Candidate(seq_id="1", max_gamma=3)]
        first, second = controller.choose(candidates, num_beside=0).gammas
        assert first == 0
        assert 0 < second <= 3
        assert controller.choose([Candidate(seq_id="0", max_gamma=0)], num_beside=0).gammas == [0]
        assert controller.choose([], num_beside=0).gammas == []
