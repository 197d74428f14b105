"""The gamma controller where prompts come beside texts, against simulated rounds."""

from statistics import mean

import pytest

from deployments.router.policy.controller import DynamicGamma
from deployments.router.policy.gamma import FixedGamma, GammaController
from deployments.router.policy.planner import DELAY_SHARE
from tests.deployments.router.policy.loads import Load
from tests.deployments.router.policy.machines import (
    BLOCKS,
    CPU,
    FIXED,
    FULL,
    GPU,
    MACHINES,
    NODES,
    WIDE,
    Machine,
)
from tests.deployments.router.policy.simulation import Run, simulate
from tests.deployments.simulated_drafts import varied

TEXT_LEN = 128
SIZES = (4, 16, 1)
"""Numbers of sequences. Each machine has one of them in its turn; `make fuzz` tries all of them."""


class TestBesidePrompts:
    """Workers have measured their steps: nothing is learnt of them in such rounds."""

    @pytest.mark.parametrize("name", [name for name in MACHINES if name != "full"])
    def test_drafts_that_cost_little_beside_a_long_prompt_are_made(
        self, name: str, has_all_combinations: bool
    ) -> None:
        """Steps are long anyway, so they had better bring many, as far as prompts may wait. A fixed
        length that makes them wait for nearly as long may only seem to be too long."""
        machine, turn = MACHINES[name], [*MACHINES].index(name)
        for num_sequences in SIZES if has_all_combinations else [SIZES[turn % len(SIZES)]]:
            alphas = [0.8] * num_sequences
            most_s = (1 + 0.9 * DELAY_SHARE) * sum(machine.round_s(0, 200 + num_sequences))
            best = max(
                machine.tokens_per_s(gamma, alphas, num_beside=200)
                for gamma in FIXED
                if sum(machine.round_s(gamma, 200 + num_sequences * (gamma + 1))) <= most_s
            )
            runs = [
                simulate(
                    machine.controller(), machine, lambda _, alphas=alphas: alphas, 300, seed=seed,
                    chance=varied, beside=lambda run: 200 if len(run.tokens) >= 200 else 0,
                )
                for seed in range(2)
            ]  # fmt: skip
            assert mean(run.tokens_per_s(210) for run in runs) > 0.94 * best

    def test_drafts_that_cost_in_full_are_no_cheaper_beside_a_prompt(self) -> None:
        """A prompt has to be run whatever is drafted: by drafts that lose time, all end later."""
        alphas = [0.5] * 16
        run = simulate(
            FULL.controller(), FULL, lambda _: alphas, 400, chance=varied,
            beside=lambda run: 200 if len(run.tokens) >= 100 else 0,
        )  # fmt: skip
        plain_s = 300 * sum(FULL.round_s(0, 200 + len(alphas)))
        num_more = sum(run.tokens[100:]) - 300 * len(alphas)
        alone_s = num_more / FULL.tokens_per_s(0, alphas)
        assert sum(run.times_s[100:]) < 1.02 * plain_s + alone_s

    @pytest.mark.parametrize(
        ("num_sequences", "prompt_len", "alpha", "least"),
        [(64, 120, 0.75, 0.99), (32, 330, 0.75, 1.01), (32, 330, 0.5, 0.99)],
    )
    def test_prompts_that_come_with_texts_make_drafts_no_cheaper(
        self, num_sequences: int, prompt_len: int, alpha: float, least: float
    ) -> None:
        """They have to be run for every text, so drafts save nothing of them, however long."""
        machine = Machine(hop=3, draft_step=0.8, verify=14, verify_token=0.7)
        alphas = [alpha] * num_sequences

        def fixed_speed(gamma: int) -> float:
            """What a token costs does not depend on how many run, so prompts may come evenly."""
            num_committed = sum(alpha**i for alpha in alphas for i in range(gamma + 1))
            num_beside = prompt_len * num_committed / TEXT_LEN
            return machine.tokens_per_s(gamma, alphas, num_beside=num_beside)

        def speed() -> float:
            controller, num_texts = machine.controller(), 0

            def beside(run: Run) -> int:
                nonlocal num_texts
                num_due = int(sum(run.tokens) / TEXT_LEN) - num_texts
                for text in range(num_texts, num_texts + num_due):
                    controller.forget(str(text % num_sequences))
                num_texts += num_due
                return prompt_len * num_due

            run = simulate(controller, machine, lambda _: alphas, 600, chance=varied, beside=beside)
            return run.tokens_per_s(200)

        assert speed() > least * max(map(fixed_speed, (0, 1, 2)))

    def test_drafts_that_do_not_pay_beside_a_prompt_are_made_again_after_it(self) -> None:
        class Narrow(Machine):
            def step_s(self, num_tokens: float) -> float:
                return super().step_s(num_tokens) + 0.003 * max(0, num_tokens - 32)

        machine = Narrow(hop=2, draft_step=1, verify=24, verify_token=0.1)
        run = simulate(
            machine.controller(), machine,
            lambda _: [0.5] * 8, 500, chance=varied,
            beside=lambda run: 60 if len(run.tokens) % 10 == 0 else 0,
        )  # fmt: skip
        beside = [any(gammas) for gammas in run.gammas[200::10]]
        after = [any(gammas) for gammas in run.gammas[201::10]]
        assert sum(beside) < 0.1 * len(beside)
        assert sum(after) > 0.8 * len(after)

    @pytest.mark.parametrize("machine", [CPU, GPU, WIDE], ids=["cpu", "gpu", "wide"])
    def test_texts_that_have_become_easy_are_seen_beside_prompts_without_end(
        self, machine: Machine
    ) -> None:
        """A busy server always has some."""

        def run(controller: GammaController, alpha: float, num_rounds: int) -> Run:
            alphas = [alpha] * 4
            return simulate(
                controller, machine, lambda _: alphas, num_rounds, chance=varied,
                beside=lambda _: 16,
            )  # fmt: skip

        controller = machine.controller()
        hard = run(controller, 0.02, 300)
        assert sum(map(any, hard.gammas[200:])) < 20
        later, anew = (run(each, 0.9, 400) for each in (controller, machine.controller()))
        assert later.tokens_per_s(200) > 0.93 * anew.tokens_per_s(200)

    def test_a_long_prompt_makes_drafts_pay_where_they_did_not(self) -> None:
        """One more token made the step a wide one, which it is now anyway."""
        alphas = [0.35] * 8
        runs = [
            simulate(
                BLOCKS.controller(), BLOCKS, lambda _: alphas, 500, seed=seed, chance=varied,
                beside=lambda run: 200 if len(run.tokens) >= 400 else 0,
            )
            for seed in range(3)
        ]  # fmt: skip
        assert max(sum(map(any, run.gammas[300:400])) for run in runs) < 20
        best = max(BLOCKS.tokens_per_s(gamma, alphas, num_beside=200) for gamma in FIXED)
        assert mean(run.tokens_per_s(410) for run in runs) > 0.94 * best

    @pytest.mark.parametrize(
        "machine", [CPU, GPU, NODES, WIDE], ids=["cpu", "gpu", "nodes", "wide"]
    )
    @pytest.mark.parametrize("prompt_len", [80, 350])
    def test_first_tokens_come_not_much_later_than_without_drafts(
        self, prompt_len: int, machine: Machine
    ) -> None:
        """The load is 32 streams that begin together, and ask again and again."""
        load = Load(num_streams=32, num_requests=48, prompt_len=prompt_len)
        plain = load.serve(FixedGamma(0), machine)
        dynamic = load.serve(DynamicGamma(**machine.measured(most=256)), machine)
        assert dynamic.first_token_s(0.95) < 1.5 * plain.first_token_s(0.95)
        assert dynamic.tokens_per_s > 0.98 * plain.tokens_per_s

    @pytest.mark.parametrize("prompt_len", [350, 1500])
    def test_prompts_of_several_steps_get_on_beside_drafts_that_pay(self, prompt_len: int) -> None:
        """Drafts for texts that run would delay those that have yet to begin, and so the batch."""
        load = Load(num_streams=8, num_requests=12, prompt_len=prompt_len, alpha=0.9)
        plain = load.serve(FixedGamma(0), GPU)
        dynamic = load.serve(DynamicGamma(**GPU.measured(most=256)), GPU)
        assert dynamic.first_token_s(0.95) < 1.25 * plain.first_token_s(0.95)
        assert dynamic.tokens_per_s > 1.3 * plain.tokens_per_s
