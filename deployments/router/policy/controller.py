"""Gamma from live acceptance and measured steps: as many drafts as pay for themselves."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from deployments.router.policy.acceptance import AcceptanceBySource
from deployments.router.policy.exploration import Exploration
from deployments.router.policy.gamma import (
    Candidate,
    Decision,
    Drafted,
    FixedGamma,
    GammaController,
    ObservedRound,
    Reason,
)
from deployments.router.policy.latency import Latency
from deployments.router.policy.planner import (
    Plan,
    Prompts,
    best_plan,
    worth_verifying,
)
from workers.types import StepTime

OPTIMISM = 1.0
"""By how many standard deviations acceptance is overestimated while no drafts are made."""
NUM_SAMPLES = 64
"""How many samples of coming drafts a round is planned with, over all of its sequences."""
PLAN_EVERY_S = 0.05
"""For how long rounds that are alike go by one plan: a hundred times what it takes to make one."""


def make_controller(
    gamma: int | Literal["dynamic"],
    *,
    target_steps: Sequence[StepTime] = (),
    draft_steps: Sequence[StepTime] = (),
) -> GammaController:
    """The controller that an option names, on workers with these step times."""
    if gamma != "dynamic":
        return FixedGamma(gamma)
    return DynamicGamma(target_steps=target_steps, draft_steps=draft_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What `choose` is asked."""

    candidates: tuple[Candidate, ...]
    num_prefill_tokens: int

    def is_near(self, other: "Question") -> bool:
        """Whether a plan for the other question serves this one: nothing is new but that sequences
        have come or gone and some of the others have less room for drafts."""
        before = {candidate.seq_id: candidate for candidate in other.candidates}
        both = [(own, before[own.seq_id]) for own in self.candidates if own.seq_id in before]
        has_prompts, had_prompts = self.num_prefill_tokens > 0, other.num_prefill_tokens > 0
        return (
            has_prompts == had_prompts
            and len(both) > 0
            and all(own == its or _has_less_room(own, its) for own, its in both)
        )

    def adapted(self, plan: Plan, *, asked: "Question") -> Plan:
        """A plan for a question that this one is near to, with the draft lengths of these
        sequences: those that have come have the longest ones."""
        lengths = {
            candidate.seq_id: gamma
            for candidate, gamma in zip(asked.candidates, plan.gammas, strict=True)
        }
        longest = max(plan.gammas)
        return replace(
            plan,
            gammas=[
                min(candidate.max_gamma, lengths.get(candidate.seq_id, longest))
                for candidate in self.candidates
            ],
        )


def _has_less_room(own: Candidate, its: Candidate) -> bool:
    """Whether the first differs from the second in less room for drafts, and in nothing else that
    matters: where there is none, nothing does."""
    return own.max_gamma == 0 or (
        own.max_gamma < its.max_gamma and replace(own, max_gamma=its.max_gamma) == its
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(Decision):
    """A decision for drafts, and the plan behind it."""

    plan: Plan


class DynamicGamma:
    """A controller that learns from what it is told of the rounds.

    A plan serves rounds that are much alike for some time. The next one is made when a round is
    observed, while the workers are busy, and not when they wait for it.
    """

    def __init__(
        self, *, target_steps: Sequence[StepTime] = (), draft_steps: Sequence[StepTime] = ()
    ) -> None:
        self._latency = Latency(target_steps=target_steps, draft_steps=draft_steps)
        self._acceptance = AcceptanceBySource()
        self._exploration = Exploration()
        self._most_prefill = 0
        """The most tokens of prompts that waited yet; the target says those that fit a step."""
        self._is_idle = False
        """Whether drafts did not pay in the last round without prompts beside it."""
        self._is_drafting = False
        """Whether drafts were made in the last round."""
        self._question: Question | None = None
        """What was asked last."""
        self._plan: tuple[Question, Plan] | None = None
        """The plan at hand, and what it was made for."""
        self._plan_age_s = 0.0
        """Seconds of rounds since it was made."""

    def use_steps(
        self, *, target_steps: Sequence[StepTime], draft_steps: Sequence[StepTime]
    ) -> None:
        self._latency = Latency(target_steps=target_steps, draft_steps=draft_steps)
        self._plan = None

    def choose(self, candidates: Sequence[Candidate], *, num_prefill_tokens: int) -> Decision:
        if not candidates:
            return _plainly(0, Reason.NOT_WORTH)
        question = Question(candidates=tuple(candidates), num_prefill_tokens=num_prefill_tokens)
        plan = self._plan_for(question)
        is_try = False
        if num_prefill_tokens == 0:
            self._is_idle = not plan.pays
        if num_prefill_tokens == 0 or not (plan.pays or self._is_drafting):
            is_try = self._exploration.begins(plan)
        if is_try and not plan.pays:  # the plan may have been made for other sequences
            plan = self._renew(question)
            is_try = not plan.pays
        self._is_drafting = plan.pays != is_try
        if not self._is_drafting:
            return _plainly(len(candidates), Reason.EXPLORE if is_try else Reason.NOT_WORTH)
        gammas = plan.gammas
        if is_try or self._exploration.goes_deeper(plan):
            gammas = [self._at_least_two(*each) for each in zip(candidates, gammas, strict=True)]
        return Planned(
            gammas=gammas,
            stop_below=[self._stop_below(candidate, plan) for candidate in candidates],
            reason=Reason.EXPLORE if is_try else Reason.BEST,
            plan=plan,
        )

    def select(self, decision: Decision, drafted: Sequence[Drafted]) -> list[int]:
        survival = [self._foretell(draft) for draft in drafted]
        if not isinstance(decision, Planned):
            return [len(chances) for chances in survival]
        if decision.reason is Reason.EXPLORE:
            return _worth_trying(drafted, survival, decision.plan.least_survival)
        return worth_verifying(survival, decision.plan, self._latency)

    def observe(self, observed: ObservedRound) -> None:
        for outcome in observed.outcomes:
            self._acceptance.of(outcome).observe(outcome)
        self._latency.observe(observed)
        self._exploration.observe(observed)
        if observed.reason is not Reason.FIRST:  # those run beside the rounds of the others
            self._plan_age_s += observed.round_s
        if self._question is not None and self._plan_age_s > PLAN_EVERY_S:
            self._renew(self._question)

    def _plan_for(self, question: Question) -> Plan:
        """The plan at hand if it serves, or else one that is made now."""
        self._question = question
        if self._plan is None:
            return self._renew(question)
        asked, plan = self._plan
        if question == asked:
            return plan
        if question.is_near(asked):
            return question.adapted(plan, asked=asked)
        return self._renew(question)

    def _renew(self, question: Question) -> Plan:
        """Make a plan, by what is known now."""
        candidates = question.candidates
        plan = best_plan(
            self._acceptance.foresee(
                candidates,
                num_samples=max(2, NUM_SAMPLES // len(candidates)),
                optimism=OPTIMISM if self._is_idle else 0.0,
            ),
            [candidate.maker for candidate in candidates],
            self._latency,
            self._prompts(question.num_prefill_tokens),
        )
        self._plan, self._plan_age_s = (question, plan), 0.0
        return plan

    def forget(self, seq_id: str) -> None:
        self._acceptance.forget(seq_id)

    def _prompts(self, num_tokens: int) -> Prompts:
        """The prompts beside a round; what fits into a step is known from those that filled one."""
        self._most_prefill = max(self._most_prefill, num_tokens)
        return Prompts(
            num_tokens=num_tokens, most=max(self._most_prefill, self._latency.most_tokens)
        )

    def _foretell(self, draft: Drafted) -> list[float]:
        """The probability that the first 1, 2, ... of these drafts are accepted."""
        acceptance = self._acceptance.of(draft)
        acceptance.remember(draft)
        return acceptance.survival(draft)

    def _at_least_two(self, candidate: Candidate, gamma: int) -> int:
        """The draft length by which something is learnt of second drafts. Where a source is silent
        about its drafts, what is known of all positions stands for them."""
        is_silent = not self._acceptance.of(candidate).has_confidences
        return gamma if is_silent else max(gamma, min(2, candidate.max_gamma))

    def _stop_below(self, candidate: Candidate, plan: Plan) -> float:
        acceptance = self._acceptance.of(candidate)
        return acceptance.least_product(candidate.seq_id, plan.least_survival)


def _plainly(num_sequences: int, reason: Reason) -> Decision:
    """A round without drafts."""
    return Decision(gammas=[0] * num_sequences, stop_below=[0.0] * num_sequences, reason=reason)


def _worth_trying(
    drafted: Sequence[Drafted], survival: Sequence[Sequence[float]], least_survival: float
) -> list[int]:
    """How many drafts of each sequence to verify in a try: one at least, so that it tells."""
    kept = [
        sum(chance >= least_survival for chance in chances) if draft.confidences else len(chances)
        for draft, chances in zip(drafted, survival, strict=True)
    ]
    if drafted and not any(kept):
        firsts = [chances[0] if chances else 0.0 for chances in survival]
        kept[firsts.index(max(firsts))] = 1
    return kept
