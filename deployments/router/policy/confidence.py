"""What a drafter's confidence says of the target's agreement, learnt from what was tested. Pure.

How sure a drafter is of a token foretells whether the target will agree, in each drafter's own way.
One exponent describes it well: P(accepted) = confidence ** beta. Each sequence departs a little
from its drafter's beta. The likelihood's gradient is followed in steps that shrink as information
gathers, as far as memory reaches, so that beta follows text that changes.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

import numpy as np

from deployments.router.policy.cost import Floats
from deployments.router.policy.gamma import Outcome

FIRST_BETA = 0.6
MEMORY_OF_DRAFTER = 200.0
"""After how many tested tokens the past has lost 63 % of its weight."""
MEMORY_OF_SEQUENCE = 40.0
PRIOR_OF_DRAFTER = 2.0
"""What the first guess weighs: a tested token brings about 0.2."""
PRIOR_OF_SEQUENCE = 4.0
MOST_CERTAIN = 0.999
LEAST_CERTAIN = 1e-6
LARGEST_DEPARTURE = 3.0
"""Of a logarithm of beta from the first guess: a factor of 20 both ways."""
NUM_PATHS = 64
"""Drafts that are remembered, to foresee the next."""
LONGEST_PATH = 64
"""Tokens of a draft, at most."""
NUM_LATER = 128
"""Tokens after the first of a draft that are remembered, to foresee how a draft would go on."""
FEWEST_LATER = 8
"""With fewer, drafts are foreseen to go on as sure as they were."""
NUM_FADED = 8
"""Drafts, and later tokens, that are left of what is to be soon outweighed."""


@dataclass(slots=True)
class _Departure:
    """Of a logarithm from what is expected of it, 0."""

    memory: float
    prior: float
    log: float = 0.0
    information: float = 0.0

    def learn(self, gradient: float, information: float) -> None:
        self.information = self.information * (1.0 - 1.0 / self.memory) + information
        weight = self.information + self.prior
        # the prior's pull fades with what the memory forgets
        self.log += (gradient - self.prior / self.memory * self.log) / weight
        self.log = min(max(self.log, -LARGEST_DEPARTURE), LARGEST_DEPARTURE)


def _of_drafter() -> _Departure:
    return _Departure(memory=MEMORY_OF_DRAFTER, prior=PRIOR_OF_DRAFTER)


def _of_sequence() -> _Departure:
    return _Departure(memory=MEMORY_OF_SEQUENCE, prior=PRIOR_OF_SEQUENCE)


@dataclass(slots=True)
class Calibration:
    """From confidences to chances of acceptance."""

    _drafter: _Departure = field(default_factory=_of_drafter)
    _sequences: dict[str, _Departure] = field(default_factory=dict)

    def observe(self, outcome: Outcome) -> None:
        sequence = self._sequences.setdefault(outcome.seq_id, _of_sequence())
        for position in range(min(outcome.num_tested, len(outcome.confidences))):
            exponent = -_log(outcome.confidences[position]) * self.beta(outcome.seq_id)
            chance = math.exp(-exponent)
            is_accepted = position < outcome.num_accepted
            # of the log likelihood, by log beta
            gradient = -exponent if is_accepted else exponent * chance / (1.0 - chance)
            information = exponent * exponent * chance / (1.0 - chance)
            self._drafter.learn(gradient, information)
            sequence.learn(gradient, information)

    def beta(self, seq_id: str, *, optimism: float = 0.0) -> float:
        """`optimism`: standard deviations of the drafter's logarithm to take off."""
        sequence = self._sequences.get(seq_id)
        deviation = 1.0 / math.sqrt(self._drafter.information + self._drafter.prior)
        log = self._drafter.log + (sequence.log if sequence else 0.0) - optimism * deviation
        return FIRST_BETA * math.exp(log)

    def survival(self, seq_id: str, confidences: Sequence[float]) -> list[float]:
        """The probability that the first 1, 2, ... of these drafts are all accepted."""
        beta, log, chances = self.beta(seq_id), 0.0, []
        for confidence in confidences:
            log += _log(confidence)
            chances.append(math.exp(beta * log))
        return chances

    def least_product(self, seq_id: str, least_survival: float) -> float:
        """The product of confidences below which fewer drafts survive than that."""
        return float(least_survival ** (1.0 / self.beta(seq_id)))

    def forget(self, seq_id: str) -> None:
        """A sequence has ended."""
        self._sequences.pop(seq_id, None)


class Paths:
    """The confidences of the last drafts, as samples of the next ones."""

    def __init__(self) -> None:
        self._added: deque[Sequence[float]] = deque()
        """Confidences that nobody asked for yet: a draft waits to be verified while they are added,
        nobody waits while the next ones are foreseen."""
        self._logs: deque[list[float]] = deque(maxlen=NUM_PATHS)
        """A path that ended goes on like others did."""
        self._later: list[float] = []
        """Logarithms too: of tokens after the first of their draft, which others go on with."""
        self._oldest_later = 0
        """Which is replaced next, once there are NUM_LATER."""
        self._next_later = 0
        """Where the next continuation begins."""

    def __len__(self) -> int:
        return min(NUM_PATHS, len(self._logs) + len(self._added))

    def add(self, confidences: Sequence[float]) -> None:
        self._added.append(confidences)

    def fade(self) -> None:
        """Let what comes next soon outweigh what was: it may be of other texts."""
        self._take_over_added()
        self._logs = deque(islice(self._logs, max(0, len(self._logs) - NUM_FADED), None), NUM_PATHS)
        newest_last = self._later[self._oldest_later :] + self._later[: self._oldest_later]
        self._later = newest_last[-NUM_FADED:]
        self._oldest_later = self._next_later = 0

    def log_products(self, depth: int, *, newest: int) -> Floats:
        """Of the confidences up to each position.  # [paths, depth]"""
        self._take_over_added()
        first = max(0, len(self) - newest)
        chosen = [logs[:depth] for logs in islice(self._logs, first, None)]
        return np.array(chosen).cumsum(axis=1)

    def _take_over_added(self) -> None:
        while self._added:
            self._take_over(self._added.popleft())

    def _take_over(self, confidences: Sequence[float]) -> None:
        logs = [_log(confidence) for confidence in confidences[:LONGEST_PATH]]
        for log in logs[1:]:
            if len(self._later) < NUM_LATER:
                self._later.append(log)
            else:
                self._later[self._oldest_later] = log
                self._oldest_later = (self._oldest_later + 1) % NUM_LATER
        logs += self._continuation(LONGEST_PATH - len(logs), sum(logs) / len(logs))
        self._logs.append(logs)

    def _continuation(self, num_tokens: int, mean_log: float) -> list[float]:
        """Of what came after first tokens, each in turn: a path that was sure so far is not much
        surer than others of what comes next."""
        if len(self._later) < FEWEST_LATER:
            return [mean_log] * num_tokens
        first = self._next_later
        self._next_later = (first + num_tokens) % len(self._later)
        return list(islice(cycle(self._later), first, first + num_tokens))


def _log(confidence: float) -> float:
    """The logarithm of a confidence within bounds; of what is no number, as if least certain."""
    if not math.isfinite(confidence):
        confidence = LEAST_CERTAIN
    return math.log(min(max(confidence, LEAST_CERTAIN), MOST_CERTAIN))
