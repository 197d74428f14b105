"""Gamma from live acceptance and measured costs: as many drafts as pay for themselves. Pure.

A round is decided twice. Before drafting, by how sure the drafter was of late: how far to draft,
and when to stop. After it, by how sure it was of these very drafts: which of them to verify. Of
drafters that do not say how sure they are, the acceptance of each position decides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from deployments.router.policy.foresight import Foresight
from deployments.router.policy.gamma import (
    Candidate,
    Decision,
    Drafted,
    FixedGamma,
    GammaController,
    ObservedRound,
    Reason,
)
from deployments.router.policy.plan import Plan, best_plan, worth_verifying
from deployments.router.policy.round_cost import RecentRate, RoundCost, UsualShare
from deployments.router.policy.trials import Trials

FIRST_GAMMAS = (4, 0, 1, 2)
"""Of the first rounds, to see what costs what."""
FIRST_DRAFTS = 16
"""At most, of all sequences together in such a round, though one of each: many take long."""
THINK_EVERY = 8
"""Rounds of which one is thought about: little is new in the others, and thinking takes the
processor from those who draft and verify."""
IDLE_THINK_EVERY = 16
"""Likewise of rounds without drafts, unless something is heard of drafts."""
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
        self._foresight = Foresight()
        self._cost = RoundCost()
        self._recent = RecentRate()
        self._usual = UsualShare()
        self._alone_rate = 0.0
        """What the sequences that were last thought about would make of their time alone."""
        self._num_first = 0
        """Of the first gammas, those that were measured."""
        self._is_idle = False
        """Whether no draft paid in the last round without a prompt beside it."""
        self._is_news = False
        """Whether something was heard of drafts since they were last thought about, or a sequence
        ended."""
        self._num_last = 0
        """Sequences that were last thought about."""
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
        if self._is_ready and not self._is_resting(candidates, num_beside):
            self._plan(candidates, num_beside)

    def choose(self, candidates: Sequence[Candidate], *, num_beside: int) -> Decision:
        if not self._is_ready:
            return _decision(self._first(candidates), Reason.FIRST)
        if self._is_resting(candidates, num_beside):
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
            self._foresight.add(of_sequence)
        price = decision.tokens_per_s
        if price is None or not all(of_sequence.confidences for of_sequence in drafted):
            return [of_sequence.num_draft_tokens for of_sequence in drafted]
        survival = [self._foresight.of_drafted(of_sequence) for of_sequence in drafted]
        verify = self._cost.verify.of(len(decision.gammas))
        return worth_verifying(survival, verify, num_others=num_others, tokens_per_s=price)

    def observe(self, observed: ObservedRound) -> None:
        self._is_probe_unseen &= observed.reason is not Reason.PROBE
        self._is_news |= bool(observed.outcomes)
        for outcome in observed.outcomes:
            self._foresight.observe(outcome)
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
        self._foresight.forget(seq_id)
        self._is_news = True  # the next sequence may be another kind
        if seq_id == self._probe:
            self._probe = None

    @property
    def _is_ready(self) -> bool:
        """Whether enough has been measured to plan."""
        return self._cost.is_known and self._num_first >= len(FIRST_GAMMAS)

    def _learn_costs(self, observed: ObservedRound) -> None:
        is_drafted = observed.longest_draft > 0
        if observed.reason is Reason.PROBE and is_drafted:
            return  # of one sequence of perhaps many, by a drafter that was not used of late
        if observed.tells_draft_cost:
            self._cost.draft.observe(observed.num_drafted, observed.longest_draft, observed.draft_s)
        if not observed.is_verify_typical:
            return
        self._num_first += is_drafted == (FIRST_GAMMAS[self._num_first % len(FIRST_GAMMAS)] > 0)
        verified = observed.num_sequences, observed.num_tokens, observed.verify_s
        if is_drafted:
            self._cost.observe_drafted(*verified)
        else:
            self._cost.observe_plain(*verified, is_idle=self._is_idle)

    def _is_resting(self, candidates: Sequence[Candidate], num_beside: int) -> bool:
        """Whether the coming round goes without drafts as the last one, as little can be new."""
        if not self._is_idle or num_beside or self._thought_of(candidates, num_beside):
            return False
        is_like_last = len(candidates) == self._num_last and not self._is_news
        return is_like_last and self._num_idle % IDLE_THINK_EVERY != 0

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
        self._foresight.fade()  # what the trial brings is to outweigh it
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
        if (thought := self._thought_of(candidates, num_beside)) is not None:
            return thought.plan
        if len(self._thoughts) >= MOST_THOUGHTS:  # of rounds that never came
            self._thoughts.clear()
        plan = self._think(candidates, num_beside)
        self._thoughts[_question(candidates, num_beside)] = _Thought(
            plan=plan, num_rounds=self._num_rounds, num_idle=self._num_idle
        )
        return plan

    def _thought_of(self, candidates: Sequence[Candidate], num_beside: int) -> _Thought | None:
        """What was thought of late of such a round."""
        thought = self._thoughts.get(_question(candidates, num_beside))
        return thought if thought is not None and self._is_of_late(thought) else None

    def _is_of_late(self, thought: _Thought) -> bool:
        age = self._num_rounds - thought.num_rounds
        most = THINK_EVERY if thought.num_rounds >= NUM_UNSETTLED else 1
        return age < most and thought.num_idle == self._num_idle

    def _think(self, candidates: Sequence[Candidate], num_beside: int) -> Plan:
        plan = self._best(candidates, num_beside=num_beside)
        self._is_news, self._num_last = False, len(candidates)
        self._alone_rate = plan.alone_tokens_per_s
        return plan

    def _best(
        self, candidates: Sequence[Candidate], *, num_beside: int, must_draft: bool = False
    ) -> Plan:
        return best_plan(
            self._foresight.survival(candidates, is_idle=self._is_idle),
            self._cost,
            num_beside=num_beside,
            recent_rate=self._recent.tokens_per_s,
            usual_share=self._usual.share,
            must_draft=must_draft,
        )

    def _stop_below(self, candidates: Sequence[Candidate], plan: Plan) -> list[float]:
        return [
            self._foresight.stop_below(candidate, plan.least_survival) for candidate in candidates
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
            least = min(reversed(draftable), key=self._foresight.num_tested)
            self._probe, self._probe_age = least.seq_id, 0
            self._is_probe_unseen = False  # the round of the last one may have been lost

    def _pause_between_probes(self, num_sequences: int) -> float:
        """Rounds after which a probe that brings nothing has cost PROBE_COST of the time."""
        verify, plain_s = self._cost.verify.of(num_sequences), self._cost.plain_s(num_sequences)
        extra_s = self._cost.draft.of(1)(1) + verify(num_sequences + 1) - plain_s
        return min(max(extra_s / plain_s / PROBE_COST, SHORTEST_PAUSE), LONGEST_PAUSE)


def _question(candidates: Sequence[Candidate], num_beside: int) -> _Question:
    return tuple(candidate.seq_id for candidate in candidates), num_beside


def _at_most(gammas: Sequence[int], candidates: Sequence[Candidate]) -> list[int]:
    """No more than each may have: a plan may be of an earlier round."""
    return [
        min(gamma, candidate.max_gamma) for gamma, candidate in zip(gammas, candidates, strict=True)
    ]


def _decision(gammas: list[int], reason: Reason) -> Decision:
    """All of these drafts are made and verified."""
    return Decision(gammas=gammas, stop_below=[0.0] * len(gammas), reason=reason)
