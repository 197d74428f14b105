"""Gamma from live acceptance and measured costs: as many drafts as pay for themselves. Pure.

A round is decided twice. Before drafting, by how sure the drafter was of late: how far to draft,
and when to stop. After it, by how sure it was of these very drafts: which of them to verify. Of
drafters that do not say how sure they are, the acceptance of each position decides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from deployments.router.acceptance import AcceptanceEstimator
from deployments.router.confidence import NUM_PATHS, Calibration, Paths
from deployments.router.cost import Floats
from deployments.router.gamma import (
    Candidate,
    Decision,
    Drafted,
    FixedGamma,
    GammaController,
    ObservedRound,
    Reason,
)
from deployments.router.plan import Plan, best_plan, worth_verifying
from deployments.router.round_cost import RecentRate, RoundCost, UsualShare
from deployments.router.trials import Trials

FIRST_GAMMAS = (4, 0, 1, 2)
"""Of the first rounds, to see what costs what."""
FIRST_DRAFTS = 16
"""At most, of all sequences together in such a round, though one of each: many take long."""
IDLE_OPTIMISM = 1.5
"""Standard deviations that drafting is given the benefit of while nothing is drafted, since nothing
is learnt then."""
THINK_EVERY = 4
"""Rounds of which one is thought about: little is new in the others, and thinking takes the
processor from those who draft and verify."""
NUM_UNSETTLED = 64
"""The first rounds with drafts that pay are all thought about."""
MOST_DISTURBED = 8
"""Rounds in a row whose costs are not learnt, since requests come and go or a prompt is long."""
PROBE_COST = 0.005
"""The share of time that may be spent on trying drafts that do not pay."""
SHORTEST_PAUSE, LONGEST_PAUSE = 8, 48
"""Rounds between probes, within which the cost decides."""
VARY_EVERY = 15
"""Rounds after which one drafts less far than seems best, or farther: were all rounds alike, nobody
would learn what a token costs."""
VARIATIONS: tuple[Callable[[int], int], ...] = (
    lambda gamma: gamma // 2,
    lambda gamma: gamma + 1,
    lambda gamma: gamma + 2,
)
"""Taken in turn."""
PRICES = (2.0, 0.7, 0.5)
"""What the target's time is taken to be worth in those rounds, so that fewer or more drafts are
verified than seems best."""
VARIED_STOP = 0.25
"""Drafters stop later in those rounds, by this factor, but do stop: a long draft of all sequences
takes many times what a round does."""
MOST_SAMPLES = 64
FEWEST_SAMPLES = 8
"""Foreseen drafts of a sequence: more only take time. With many sequences, each has others."""
IDLE_PATHS = 24
"""Of the last drafts, those that count while nothing is drafted."""
MOST_THOUGHTS = 16
"""Plans for coming rounds."""
LONGEST_PROBE = 12
"""Rounds of a probe, as long as everything is accepted or nothing comes. Those in which its drafter
is catching up are not counted."""


_Question = tuple[tuple[str, ...], int]
"""What a plan is for: sequence ids, and the tokens of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Thought:
    """A plan, and how many rounds there had been then, with and without drafts that paid."""

    plan: Plan
    num_rounds: int
    num_idle: int


def make_controller(gamma: int | Literal["dynamic"]) -> GammaController:
    """The controller that an option names."""
    return DynamicGamma() if gamma == "dynamic" else FixedGamma(gamma)


class DynamicGamma:
    """A controller that learns from what it is told of the rounds."""

    def __init__(self) -> None:
        self._acceptance = AcceptanceEstimator()
        self._calibration = Calibration()
        self._paths = Paths()
        self._cost = RoundCost()
        self._recent = RecentRate()
        self._usual = UsualShare()
        self._alone_rate = 0.0
        """What the sequences that were last thought about would make of their time alone."""
        self._num_first = 0
        """Of the first gammas, those that were measured."""
        self._is_idle = False
        """Whether no draft paid in the last round without a prompt beside it."""
        self._num_idle = 0
        """Rounds in which no draft paid."""
        self._num_rounds = 0
        """Rounds with drafts that paid."""
        self._num_disturbed = 0
        """Rounds, of those that tell a cost, since one was learnt."""
        self._pause = 0
        """Undrafted rounds since a probe told something."""
        self._probe: str | None = None
        """The sequence that is drafted all the same, by one token, to see whether it would pay."""
        self._probe_age = 0
        """Its rounds in which a draft could have come."""
        self._is_probe_unseen = False
        """Whether what became of the last probe is yet to be told."""
        self._trials = Trials()
        self._thoughts: dict[_Question, _Thought] = {}
        """One for each round that is under way."""

    def prepare(self, candidates: Sequence[Candidate], *, num_beside: int) -> None:
        if self._is_ready and not self._is_resting(num_beside):
            self._plan(candidates, num_beside)

    def choose(self, candidates: Sequence[Candidate], *, num_beside: int) -> Decision:
        if not self._is_ready:
            return _decision(self._first(candidates), Reason.FIRST)
        if self._is_resting(num_beside):
            return self._rest(candidates, num_beside)
        plan = self._plan(candidates, num_beside)
        gammas = _at_most(plan.gammas, candidates)
        if not any(gammas):
            self._trials.loss = plan.loss
            return self._rest(candidates, num_beside)
        self._is_idle = False
        self._trials.end()
        self._num_rounds += 1
        stop_below = self._stop_below(candidates, plan)
        turn, rounds_since = divmod(self._num_rounds, VARY_EVERY)
        if rounds_since > 0:
            return Decision(
                gammas=gammas,
                stop_below=stop_below,
                reason=Reason.BEST,
                tokens_per_s=plan.tokens_per_s,
            )
        vary = VARIATIONS[turn % len(VARIATIONS)]
        varied = [
            min(vary(gamma), candidate.max_gamma) if gamma else 0
            for gamma, candidate in zip(gammas, candidates, strict=True)
        ]
        return Decision(
            gammas=varied,
            stop_below=[VARIED_STOP * least for least in stop_below],
            reason=Reason.VARIED,
            tokens_per_s=plan.tokens_per_s * PRICES[turn % len(PRICES)],
        )

    def keep(self, decision: Decision, drafted: Sequence[Drafted], *, num_others: int) -> list[int]:
        for of_sequence in drafted:
            if of_sequence.confidences:
                self._paths.add(of_sequence.confidences)
        price = decision.tokens_per_s
        if price is None or not all(of_sequence.confidences for of_sequence in drafted):
            return [of_sequence.num_draft_tokens for of_sequence in drafted]
        survival = [
            self._calibration.survival(of_sequence.seq_id, of_sequence.confidences)
            for of_sequence in drafted
        ]
        verify = self._cost.verify.of(len(decision.gammas))
        return worth_verifying(survival, verify, num_others=num_others, tokens_per_s=price)

    def observe(self, observed: ObservedRound) -> None:
        self._is_probe_unseen &= observed.reason is not Reason.PROBE
        for outcome in observed.outcomes:
            self._acceptance.observe(outcome)
            self._calibration.observe(outcome)
            if outcome.seq_id == self._probe:
                self._pause = 0
                if outcome.num_accepted < outcome.num_draft_tokens:
                    self._probe = None
        if observed.is_verify_typical:
            self._recent.observe(observed.num_committed, observed.draft_s + observed.verify_s)
        if not (observed.tells_draft_cost or observed.is_verify_typical):
            return
        if observed.is_disturbed and self._is_ready and self._num_disturbed < MOST_DISTURBED:
            self._num_disturbed += 1
        else:
            self._num_disturbed = 0
            self._learn_costs(observed)

    def forget(self, seq_id: str) -> None:
        if self._alone_rate:
            self._usual.observe(self._recent.tokens_per_s / self._alone_rate)
        self._acceptance.forget(seq_id)
        self._calibration.forget(seq_id)
        if seq_id == self._probe:
            self._probe = None

    @property
    def _is_ready(self) -> bool:
        """Whether enough has been measured to plan."""
        return self._cost.is_known and self._num_first >= len(FIRST_GAMMAS)

    def _learn_costs(self, observed: ObservedRound) -> None:
        if observed.tells_draft_cost and observed.reason is not Reason.PROBE:
            self._cost.draft.observe(observed.num_drafted, observed.longest_draft, observed.draft_s)
        if observed.is_verify_typical:
            is_drafted = observed.longest_draft > 0
            self._num_first += is_drafted == (FIRST_GAMMAS[self._num_first % len(FIRST_GAMMAS)] > 0)
            self._cost.verify.observe(
                observed.num_sequences, observed.num_tokens, observed.verify_s
            )

    def _is_resting(self, num_beside: int) -> bool:
        """Whether the coming round goes without drafts as the last one, as little can be new."""
        return self._is_idle and not num_beside and self._num_idle % THINK_EVERY != 0

    def _rest(self, candidates: Sequence[Candidate], num_beside: int) -> Decision:
        """A round without drafts that pay. Beside a prompt that says nothing of rounds without."""
        self._is_idle |= num_beside == 0
        self._num_idle += 1
        if num_beside == 0 and self._is_trial(candidates):
            return self._try(candidates)
        gammas = self._with_probe(candidates)
        return _decision(gammas, Reason.PROBE if any(gammas) else Reason.NOT_WORTH)

    def _is_trial(self, candidates: Sequence[Candidate]) -> bool:
        """Whether the coming round is to draft although that does not pay."""
        is_ready = any(c.max_gamma and not c.is_catching_up for c in candidates)
        if self._trials.goes_on(is_ready=is_ready):
            return True
        if not self._trials.begins(len(candidates)):
            return False
        self._paths.fade()  # what the trial brings is to outweigh it
        return True

    def _try(self, candidates: Sequence[Candidate]) -> Decision:
        """What would be drafted if it had to be. All of it is verified, whatever that may cost."""
        plan = self._best(candidates, num_beside=0, must_draft=True)
        gammas = _at_most(plan.gammas, candidates)
        return Decision(
            gammas=gammas, stop_below=self._stop_below(candidates, plan), reason=Reason.TRIAL
        )

    def _first(self, candidates: Sequence[Candidate]) -> list[int]:
        """To measure what is not known yet."""
        gamma = FIRST_GAMMAS[self._num_first % len(FIRST_GAMMAS)]
        gamma = min(gamma, max(1, FIRST_DRAFTS // max(1, len(candidates))))
        return [min(gamma, candidate.max_gamma) for candidate in candidates]

    def _plan(self, candidates: Sequence[Candidate], num_beside: int) -> Plan:
        """What was thought of late, or now."""
        question = tuple(candidate.seq_id for candidate in candidates), num_beside
        thought = self._thoughts.get(question)
        if thought is None or not self._is_of_late(thought):
            if len(self._thoughts) >= MOST_THOUGHTS:  # of rounds that never came
                self._thoughts.clear()
            thought = self._thoughts[question] = _Thought(
                plan=self._think(candidates, num_beside),
                num_rounds=self._num_rounds,
                num_idle=self._num_idle,
            )
        return thought.plan

    def _is_of_late(self, thought: _Thought) -> bool:
        age = self._num_rounds - thought.num_rounds
        most = THINK_EVERY if thought.num_rounds >= NUM_UNSETTLED else 1
        return age < most and thought.num_idle == self._num_idle

    def _think(self, candidates: Sequence[Candidate], num_beside: int) -> Plan:
        plan = self._best(candidates, num_beside=num_beside)
        self._alone_rate = plan.alone_tokens_per_s
        return plan

    def _best(
        self, candidates: Sequence[Candidate], *, num_beside: int, must_draft: bool = False
    ) -> Plan:
        return best_plan(
            self._foresee(candidates),
            self._cost,
            num_beside=num_beside,
            recent_rate=self._recent.tokens_per_s,
            usual_share=self._usual.share,
            must_draft=must_draft,
        )

    def _foresee(self, candidates: Sequence[Candidate]) -> Floats:
        """How likely the coming drafts are to survive.  # [sequences, samples, depth]"""
        optimism = IDLE_OPTIMISM if self._is_idle else 0.0
        depth = max((candidate.max_gamma for candidate in candidates), default=0)
        if depth == 0 or not len(self._paths):
            rows = [
                self._acceptance.survival(c.seq_id, depth, optimism=optimism) for c in candidates
            ]
            survival = np.array(rows).reshape(len(candidates), 1, depth)
        else:
            betas = [self._calibration.beta(c.seq_id, optimism=optimism) for c in candidates]
            logs = self._paths.log_products(
                depth, newest=IDLE_PATHS if self._is_idle else NUM_PATHS
            )
            num_samples = min(len(logs), max(FEWEST_SAMPLES, MOST_SAMPLES // len(candidates)))
            dealt = np.arange(len(candidates) * num_samples) % len(logs)
            samples = logs[dealt].reshape(len(candidates), num_samples, depth)
            survival = np.exp(np.array(betas)[:, None, None] * samples)
        most = np.array([candidate.max_gamma for candidate in candidates], dtype=int)
        return np.where(np.arange(depth) < most[:, None, None], survival, 0.0)

    def _stop_below(self, candidates: Sequence[Candidate], plan: Plan) -> list[float]:
        return [
            self._calibration.least_product(candidate.seq_id, plan.least_survival)
            for candidate in candidates
        ]

    def _with_probe(self, candidates: Sequence[Candidate]) -> list[int]:
        """No drafts, but for one token of one sequence now and then."""
        self._pause += 1
        if self._probe is None:
            self._start_probe(candidates)
        gammas = [0] * len(candidates)
        for index, candidate in enumerate(candidates):
            if candidate.seq_id != self._probe or candidate.max_gamma == 0:
                continue
            self._probe_age += not candidate.is_catching_up
            if self._probe_age > LONGEST_PROBE:
                self._probe, self._pause = None, 0
            elif not self._is_probe_unseen:
                gammas[index], self._is_probe_unseen = 1, True
        return gammas

    def _start_probe(self, candidates: Sequence[Candidate]) -> None:
        draftable = [candidate for candidate in candidates if candidate.max_gamma > 0]
        if draftable and self._pause >= self._pause_between_probes(len(candidates)):
            # the one we know least of, and of those the newest
            least = min(reversed(draftable), key=self._num_tested)
            self._probe, self._probe_age = least.seq_id, 0
            self._is_probe_unseen = False  # the round of the last one may have been lost

    def _num_tested(self, candidate: Candidate) -> int:
        return self._acceptance.num_tested(candidate.seq_id)

    def _pause_between_probes(self, num_sequences: int) -> float:
        """Rounds after which a probe that brings nothing has cost PROBE_COST of the time."""
        verify = self._cost.verify.of(num_sequences)
        plain_s = verify(num_sequences)
        extra_s = self._cost.draft.of(1)(1) + verify(num_sequences + 1) - plain_s
        return min(max(extra_s / plain_s / PROBE_COST, SHORTEST_PAUSE), LONGEST_PAUSE)


def _at_most(gammas: Sequence[int], candidates: Sequence[Candidate]) -> list[int]:
    """No more than each may have: a plan may be of an earlier round."""
    return [
        min(gamma, candidate.max_gamma) for gamma, candidate in zip(gammas, candidates, strict=True)
    ]


def _decision(gammas: list[int], reason: Reason) -> Decision:
    """All of these drafts are made and verified."""
    return Decision(gammas=gammas, stop_below=[0.0] * len(gammas), reason=reason)
