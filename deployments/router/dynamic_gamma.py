"""Gamma from live acceptance and measured costs: as many drafts as pay for themselves. Pure.

Every round maximises expected tokens per second over the whole batch,

    sum_i (1 + sum_{j <= k_i} P(the first j drafts of i are accepted)) / (draft(max k) + verify(n)),

where n counts the tokens to verify. For a given longest draft, verifying costs the same for every
token, so tokens are taken by their probability of being accepted, as many as give the best rate: a
step in the costs may hide behind one that does not pay.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from deployments.router.acceptance import AcceptanceEstimator
from deployments.router.cost import RoundCost
from deployments.router.gamma import (
    Candidate,
    Decision,
    FixedGamma,
    GammaController,
    ObservedRound,
    Reason,
)

FIRST_GAMMAS = (4, 0, 1, 2)
"""Of the first rounds, to see what costs what."""
IDLE_OPTIMISM = 1.0
"""Standard deviations that drafting is given the benefit of while nothing is drafted, since nothing
is learnt then."""
PROBE_COST = 0.01
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
LONGEST_PROBE = 12
"""Rounds of a probe: until the drafter has caught up, and as long as everything is accepted."""


def make_controller(gamma: int | Literal["dynamic"]) -> GammaController:
    """The controller that an option names."""
    return DynamicGamma() if gamma == "dynamic" else FixedGamma(gamma)


class DynamicGamma:
    """A controller that learns from what it is told of the rounds."""

    def __init__(self) -> None:
        self._acceptance = AcceptanceEstimator()
        self._cost = RoundCost()
        self._num_first = 0
        """Of the first gammas, those that were measured."""
        self._num_rounds = 0
        self._is_idle = False
        """Whether nothing was worth drafting in the last round."""
        self._pause = 0
        """Idle rounds since the last probe."""
        self._probe: str | None = None
        """The sequence that is drafted all the same, by one token, to see whether it would pay."""
        self._probe_age = 0

    def choose(self, candidates: Sequence[Candidate]) -> Decision:
        if not self._cost.is_known or self._num_first < len(FIRST_GAMMAS):
            gamma = FIRST_GAMMAS[self._num_first % len(FIRST_GAMMAS)]
            first = [min(gamma, candidate.max_gamma) for candidate in candidates]
            return Decision(gammas=first, reason=Reason.FIRST)
        gammas = self._best(candidates)
        self._is_idle = not any(gammas)
        if self._is_idle:
            gammas = self._with_probe(candidates)
            return Decision(gammas=gammas, reason=Reason.PROBE if any(gammas) else Reason.NOT_WORTH)
        self._num_rounds += 1
        turn, rounds_since = divmod(self._num_rounds, VARY_EVERY)
        if rounds_since == 0:
            vary = VARIATIONS[turn % len(VARIATIONS)]
            varied = [
                min(vary(gamma), candidate.max_gamma) if gamma else 0
                for gamma, candidate in zip(gammas, candidates, strict=True)
            ]
            return Decision(gammas=varied, reason=Reason.VARIED)
        return Decision(gammas=gammas, reason=Reason.BEST)

    def observe(self, observed: ObservedRound) -> None:
        for outcome in observed.outcomes:
            self._acceptance.observe(outcome)
            if outcome.seq_id == self._probe and outcome.num_accepted < outcome.num_draft_tokens:
                self._probe = None
        if observed.longest_draft > 0 and observed.is_draft_typical:
            self._cost.draft.observe(observed.longest_draft, observed.draft_s)
        if observed.is_verify_typical:
            is_drafted = observed.longest_draft > 0
            self._num_first += is_drafted == (FIRST_GAMMAS[self._num_first % len(FIRST_GAMMAS)] > 0)
            self._cost.verify.observe(observed.num_tokens, observed.verify_s)

    def forget(self, seq_id: str) -> None:
        self._acceptance.forget(seq_id)

    def _best(self, candidates: Sequence[Candidate]) -> list[int]:
        optimism = IDLE_OPTIMISM if self._is_idle else 0.0
        survival = [
            self._acceptance.survival(c.seq_id, c.max_gamma, optimism=optimism) for c in candidates
        ]
        tokens = sorted(
            (
                (probability, index, position)
                for index, of_sequence in enumerate(survival)
                for position, probability in enumerate(of_sequence)
            ),
            key=lambda token: (-token[0], token[2]),
        )
        num_sequences = len(candidates)
        verify_s = [self._cost.verify(num_sequences + n) for n in range(len(tokens) + 1)]
        best = [0] * num_sequences
        best_rate = num_sequences / verify_s[0]
        for longest in range(1, max((len(s) for s in survival), default=0) + 1):
            draft_s = self._cost.draft(longest)
            gammas = [0] * num_sequences
            expected, num_tokens = float(num_sequences), 0
            for probability, index, position in tokens:
                if position >= longest:
                    continue
                expected, num_tokens = expected + probability, num_tokens + 1
                gammas[index] = position + 1  # probabilities fall with the position
                rate = expected / (draft_s + verify_s[num_tokens])
                if rate > best_rate:
                    best, best_rate = gammas.copy(), rate
        return best

    def _with_probe(self, candidates: Sequence[Candidate]) -> list[int]:
        """No drafts, but for one token of one sequence now and then."""
        gammas = [0] * len(candidates)
        draftable = [i for i, candidate in enumerate(candidates) if candidate.max_gamma > 0]
        probed = [i for i in draftable if candidates[i].seq_id == self._probe]
        self._pause += 1
        self._probe_age += 1
        if not probed or self._probe_age >= LONGEST_PROBE:
            self._probe = None
            if not draftable or self._pause < self._pause_between_probes(len(candidates)):
                return gammas
            # the one we know least of, and of those the newest
            least = min(reversed(draftable), key=lambda i: self._num_tested(candidates[i]))
            self._probe, self._probe_age = candidates[least].seq_id, 0
            probed = [least]
        self._pause = 0
        gammas[probed[0]] = 1
        return gammas

    def _num_tested(self, candidate: Candidate) -> int:
        return self._acceptance.num_tested(candidate.seq_id)

    def _pause_between_probes(self, num_sequences: int) -> float:
        """Rounds after which a probe that brings nothing has cost PROBE_COST of the time."""
        plain_s = self._cost.verify(num_sequences)
        extra_s = self._cost.draft(1) + self._cost.verify(num_sequences + 1) - plain_s
        return min(max(extra_s / plain_s / PROBE_COST, SHORTEST_PAUSE), LONGEST_PAUSE)
