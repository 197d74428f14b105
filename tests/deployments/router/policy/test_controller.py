"""When the dynamic controller makes its plans, and which rounds they serve."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from deployments.router.policy import controller as controller_module
from deployments.router.policy.controller import PLAN_EVERY_S, DynamicGamma, Question
from deployments.router.policy.exploration import FREE_TRIES
from deployments.router.policy.gamma import Candidate, Maker, ObservedRound, Reason
from deployments.router.policy.planner import Plan, best_plan
from tests.deployments.router.policy.machines import CPU
from tests.deployments.router.policy.simulation import simulate
from tests.deployments.simulated_drafts import varied


class LatePlanner(DynamicGamma):
    """Makes every plan when it is asked for it."""

    _is_due = False

    def observe(self, observed: ObservedRound) -> None:
        super().observe(observed)
        self._is_due = self._is_due or self._plan_age_s == 0.0

    def _plan_for(self, question: Question) -> Plan:
        if self._is_due and self._plan is not None:
            asked, _ = self._plan
            if question.is_near(asked):
                self._renew(question)
        self._is_due = False
        return super()._plan_for(question)


@pytest.mark.parametrize("num_prefill_tokens", [0, 200])
def test_a_plan_made_while_workers_are_busy_is_that_of_its_round(num_prefill_tokens: int) -> None:
    runs = [
        simulate(
            make(**CPU.measured()), CPU, lambda _: [0.6] * 4, 200, chance=varied,
            beside=lambda run: num_prefill_tokens * (len(run.tokens) % 3 == 0),
        )
        for make in (DynamicGamma, LatePlanner)
    ]  # fmt: skip
    assert any(map(any, runs[0].gammas))
    assert runs[0].gammas == runs[1].gammas


class Asked:
    """A controller that is asked for rounds, and when it made which plans."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[str] = []
        self.controller = CPU.controller()
        self._doing = ""
        self._more_s = 0.0
        monkeypatch.setattr(controller_module, "best_plan", self._best_plan)

    def _best_plan(self, *args: Any) -> Plan:
        self.plans.append(self._doing)
        plan = best_plan(*args)
        return replace(plan, time_s=plan.time_s + self._more_s)

    def make_drafts_dear(self) -> None:
        """From now on none pay; the tries that cost nothing are over."""
        self._more_s = 1.0
        for _ in range(2 * FREE_TRIES):
            self.round(candidates("ab"), seconds=PLAN_EVERY_S / 100)
        self.plans.clear()

    def round(
        self, candidates: Sequence[Candidate], *, seconds: float, num_prefill_tokens: int = 0
    ) -> list[int]:
        """The draft lengths of a round that takes so long, of which the controller is told."""
        names = "".join(candidate.seq_id for candidate in candidates)
        self._doing = f"choose {names}"
        decision = self.controller.choose(candidates, num_prefill_tokens=num_prefill_tokens)
        self._doing = f"observe {names}"
        self.controller.observe(plain_round(len(candidates), seconds=seconds))
        return decision.gammas


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


def candidates(seq_ids: str, *, max_gamma: int = 8) -> list[Candidate]:
    return [Candidate(seq_id=seq_id, max_gamma=max_gamma) for seq_id in seq_ids]


def test_a_round_much_like_the_last_ones_waits_for_no_plan(asked: Asked) -> None:
    for names in ("ab", "ab", "ab", "b", "bc"):
        asked.round(candidates(names), seconds=0.8 * PLAN_EVERY_S)
    assert asked.plans == ["choose ab", "observe ab", "observe b"]


def test_a_sequence_that_has_come_drafts_as_far_as_any_other(asked: Asked) -> None:
    for _ in range(2):
        a, b = asked.round(candidates("ab"), seconds=PLAN_EVERY_S / 100)
    assert min(a, b) > 0
    others = [*candidates("bc"), *candidates("d", max_gamma=1), *candidates("e", max_gamma=0)]
    assert asked.round(others, seconds=PLAN_EVERY_S / 100) == [b, max(a, b), 1, 0]
    assert asked.plans == ["choose ab"]


def test_short_rounds_share_a_plan(asked: Asked) -> None:
    """Where a plan takes a good part of a round, and processes share cores."""
    for _ in range(100):
        asked.round(candidates("ab"), seconds=PLAN_EVERY_S / 10)
    assert 9 <= len(asked.plans) <= 11


def test_prompts_that_run_beside_the_rounds_make_no_plan_older(asked: Asked) -> None:
    """A new sequence's first round is one of its own, as long as several of the others'."""
    for _ in range(5):
        asked.round(candidates("ab"), seconds=PLAN_EVERY_S / 100)
        first = plain_round(1, seconds=2 * PLAN_EVERY_S)
        asked.controller.observe(replace(first, reason=Reason.FIRST))
    assert asked.plans == ["choose ab"]


def test_a_text_near_its_end_needs_no_plan_of_its_own(asked: Asked) -> None:
    lengths = [
        asked.round(candidates("a", max_gamma=room), seconds=PLAN_EVERY_S / 100)
        for room in range(8, -1, -1)
    ]
    assert all(length <= room for (length,), room in zip(lengths, range(8, -1, -1), strict=True))
    assert len(asked.plans) <= 2 + max(length for (length,) in lengths)


def test_a_text_whose_last_token_comes_needs_no_plan_of_its_own(asked: Asked) -> None:
    """Nothing drafts for it any more, so it has no source."""
    asked.make_drafts_dear()
    last = [*candidates("a"), Candidate(seq_id="b", max_gamma=0, source="")]
    asked.round(last, seconds=PLAN_EVERY_S / 100)
    assert not asked.plans


def test_more_drafts_in_hand_are_a_new_question(asked: Asked) -> None:
    def found(num_drafts: int) -> list[int]:
        in_hand = Candidate(
            seq_id="a", max_gamma=num_drafts, source="prompt_lookup", maker=Maker.NOBODY
        )
        return asked.round([in_hand], seconds=PLAN_EVERY_S / 100)

    found(0)
    lengths = [found(2)[0] for _ in range(3)]
    lengths += [found(6)[0] for _ in range(3)]
    assert max(lengths[:3]) == 2
    assert max(lengths[3:]) == 6


@pytest.mark.parametrize(("num_prefill_tokens", "at_first"), [(0, []), (16, ["choose abc"])])
def test_without_drafts_nothing_waits_when_sequences_come_and_go(
    asked: Asked, num_prefill_tokens: int, at_first: list[str]
) -> None:
    """Whether prompts wait is another question."""
    asked.make_drafts_dear()
    for names in ("abc", "bc", "bcd", "bcd", "bcde"):
        lengths = asked.round(
            candidates(names), seconds=0.3 * PLAN_EVERY_S, num_prefill_tokens=num_prefill_tokens
        )
        assert not any(lengths)
    assert asked.plans == [*at_first, "observe bcd"]


@pytest.mark.parametrize(
    "others",
    [
        candidates("cd"),
        [Candidate(seq_id="a", max_gamma=2, source="prompt_lookup", maker=Maker.NOBODY)],
        candidates("ab", max_gamma=9),
    ],
    ids=["other sequences", "drafts in hand", "more room"],
)
def test_what_may_be_worth_drafts_is_planned_for(asked: Asked, others: list[Candidate]) -> None:
    asked.make_drafts_dear()
    asked.round(others, seconds=PLAN_EVERY_S / 100)
    assert [plan.split()[0] for plan in asked.plans] == ["choose"]


@pytest.mark.parametrize("num_prefill_tokens", [(0, 200), (200, 0)])
def test_where_drafts_pay_prompts_that_come_or_go_are_planned_for(
    asked: Asked, num_prefill_tokens: tuple[int, int]
) -> None:
    """They must not wait for long."""
    for each in num_prefill_tokens:
        asked.round(candidates("ab"), seconds=PLAN_EVERY_S / 100, num_prefill_tokens=each)
    assert set(asked.plans) == {"choose ab"}
    assert len(asked.plans) >= 2


def plain_round(num_sequences: int, *, seconds: float) -> ObservedRound:
    return ObservedRound(
        reason=Reason.NOT_WORTH, outcomes=(), num_sequences=num_sequences, num_drafted=0,
        longest_draft=0, num_tokens=num_sequences, num_committed=num_sequences, draft_s=None,
        draft_compute_s=0.0, draft_further_s=0.0, verify_s=None, verify_compute_s=0.0,
        router_s=0.0, round_s=seconds,
    )  # fmt: skip
