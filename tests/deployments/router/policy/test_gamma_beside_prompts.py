"""The gamma controller where prompts come beside texts, against simulated rounds."""

from dataclasses import dataclass
from statistics import mean

import pytest

from deployments.router.policy.controller import DynamicGamma
from deployments.router.policy.gamma import FixedGamma, GammaController, Maker
from tests.deployments.router.policy.loads import Load
from tests.deployments.router.policy.machines import (
    CPU,
    FIXED,
    GPU,
    MACHINES,
    NODES,
    PAIR,
    WIDE,
    Machine,
)
from tests.deployments.router.policy.simulation import Run, simulate
from tests.deployments.simulated_drafts import varied

TEXT_LEN = 128


@dataclass
class Coming:
    """Prompts that wait: one for every so many tokens of texts."""

    every: int
    prompt_len: int
    num_come: int = 0

    def __call__(self, run: Run) -> int:
        is_due = sum(run.tokens) > self.every * (self.num_come + 1)
        self.num_come += is_due
        return self.prompt_len * is_due


SIZES = (4, 16, 1)
"""Numbers of sequences. Each machine has one of them in its turn; `make fuzz` tries all of them."""


class TestBesidePrompts:
    """Workers have measured their steps: nothing is learnt of them in such rounds."""

    @pytest.mark.parametrize("alpha", [0.5, 0.8])
    @pytest.mark.parametrize("prompt_len", [60, 200])
    @pytest.mark.parametrize("name", MACHINES)
    def test_it_is_as_good_as_the_best_lengths_beside_prompts_and_without(
        self, name: str, prompt_len: int, alpha: float, has_all_combinations: bool
    ) -> None:
        """A prompt comes with every so many tokens, and has to be run whatever is drafted. Beside
        it another length may be the best one than without."""
        machine, turn = MACHINES[name], [*MACHINES].index(name)
        for num_sequences in SIZES if has_all_combinations else [SIZES[turn % len(SIZES)]]:
            alphas, text_len = [alpha] * num_sequences, 30 * num_sequences
            rate = max(machine.tokens_per_s(gamma, alphas) for gamma in FIXED)

            def text_s(gamma: int, alphas: list[float] = alphas, rate: float = rate) -> float:
                """Seconds of a prompt and its text, with drafts of this length beside it."""
                num_committed = sum(alpha**i for alpha in alphas for i in range(gamma + 1))
                beside = machine.tokens_per_s(gamma, alphas, num_beside=prompt_len)
                return num_committed / beside + (30 * len(alphas) - num_committed) / rate

            speeds = [
                simulate(
                    machine.controller(), machine, lambda _, alphas=alphas: alphas, 600, seed=seed,
                    chance=varied, beside=Coming(every=text_len, prompt_len=prompt_len),
                ).tokens_per_s(200)
                for seed in range(2)
            ]  # fmt: skip
            assert mean(speeds) > 0.96 * text_len / min(map(text_s, FIXED))

    @pytest.mark.parametrize(
        ("num_sequences", "prompt_len", "alpha", "least"),
        [(64, 120, 0.75, 0.99), (32, 330, 0.75, 1.01), (32, 330, 0.5, 0.99)],
    )
    def test_prompts_that_come_with_texts_make_drafts_no_cheaper(
        self, num_sequences: int, prompt_len: int, alpha: float, least: float
    ) -> None:
        """They have to be run for every text, so drafts save nothing of them, however long, but the
        time in which drafts are made."""
        machine = Machine(hop=3, draft_step=0.8, verify=14, verify_token=0.7)
        alphas = [alpha] * num_sequences

        def speed(controller: GammaController) -> float:
            num_texts = 0

            def beside(run: Run) -> int:
                nonlocal num_texts
                num_due = int(sum(run.tokens) / TEXT_LEN) - num_texts
                for text in range(num_texts, num_texts + num_due):
                    controller.forget(str(text % num_sequences))
                num_texts += num_due
                return prompt_len * num_due

            run = simulate(controller, machine, lambda _: alphas, 600, chance=varied, beside=beside)
            return run.tokens_per_s(200)

        best = max(speed(FixedGamma(gamma)) for gamma in (0, 1, 2))
        assert speed(machine.controller()) > least * best

    def test_drafts_that_do_not_pay_beside_a_prompt_are_made_again_after_it(self) -> None:
        """A short prompt costs little beside a verification, and a step of its own before one."""
        machine = Machine(hop=2, draft_step=1, verify=24, verify_token=0.1)
        run = simulate(
            machine.controller(), machine,
            lambda _: [0.5] * 8, 500, chance=varied,
            beside=lambda run: 16 if len(run.tokens) % 10 == 0 else 0,
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

    @pytest.mark.parametrize("machine", [PAIR, GPU], ids=["pair", "gpu"])
    def test_drafts_at_hand_leave_prompts_their_place(self, machine: Machine) -> None:
        """Prompts run beside their verification, and not before it."""
        load = Load(num_streams=32, num_requests=64, prompt_len=80, alpha=0.9, maker=Maker.NOBODY)
        plain = load.serve(FixedGamma(0), machine)
        dynamic = load.serve(DynamicGamma(**machine.measured(most=256)), machine)
        assert dynamic.first_token_s(0.95) < 1.25 * plain.first_token_s(0.95)
        assert dynamic.tokens_per_s > 1.5 * plain.tokens_per_s

    @pytest.mark.parametrize("prompt_len", [115, 330])
    @pytest.mark.parametrize("machine", [PAIR, WIDE, GPU], ids=["pair", "wide", "gpu"])
    def test_a_load_full_of_prompts_is_served_as_fast_as_with_the_best_length(
        self, machine: Machine, prompt_len: int
    ) -> None:
        """While drafts are made the target runs prompts, so they may cost nothing."""
        load = Load(num_streams=32, num_requests=128, prompt_len=prompt_len, num_output=64)
        dynamic = load.serve(DynamicGamma(**machine.measured(most=256)), machine)
        fixed = [load.serve(FixedGamma(gamma), machine).tokens_per_s for gamma in (0, 1, 2, 4)]
        assert dynamic.tokens_per_s > 0.95 * max(fixed)

    @pytest.mark.parametrize("prompt_len", [350, 1500])
    def test_prompts_of_several_steps_get_on_beside_drafts_that_pay(self, prompt_len: int) -> None:
        """Drafts for texts that run would delay those that have yet to begin, and so the batch."""
        load = Load(num_streams=8, num_requests=12, prompt_len=prompt_len, alpha=0.9)
        plain = load.serve(FixedGamma(0), GPU)
        dynamic = load.serve(DynamicGamma(**GPU.measured(most=256)), GPU)
        assert dynamic.first_token_s(0.95) < 1.25 * plain.first_token_s(0.95)
        assert dynamic.tokens_per_s > 1.3 * plain.tokens_per_s
