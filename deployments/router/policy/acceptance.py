"""How likely the target is to agree with a draft, learnt from what it tested. Pure.

A draft token after the first rejection was never tested, so it says nothing: accepted / drafted
would read 0.42 where eight drafts are accepted with probability 0.8 each. What is estimated is the
rate at each position given that the positions before it were accepted, of the drafter as a whole,
and how far a sequence departs from that.
"""

import math
from dataclasses import dataclass, field

from deployments.router.policy.gamma import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """After how many tested tokens the past has lost 63 % of its weight, and how much a guess
    weighs against it, in tested tokens."""

    of_drafter: float = 100.0
    of_sequence: float = 60.0
    position_prior: float = 6.0
    """Pulls a position to the rate of all positions."""
    sequence_prior: float = 8.0
    """Pulls a sequence to the drafter's rates."""
    first_guess: float = 0.7
    """The rate before anything was tested."""
    first_guess_weight: float = 4.0


@dataclass(slots=True)
class _Rate:
    accepted: float = 0.0
    tested: float = 0.0

    def observe(self, is_accepted: bool, memory: float) -> None:
        decay = 1.0 - 1.0 / memory
        self.accepted = self.accepted * decay + is_accepted
        self.tested = self.tested * decay + 1.0

    def shrunk_to(self, guess: float, weight: float) -> float:
        return (self.accepted + weight * guess) / (self.tested + weight)


@dataclass(slots=True)
class _Departure:
    """A sequence's accepted tokens, and those its drafter's rates had led to expect."""

    accepted: float = 0.0
    expected: float = 0.0
    num_tested: int = 0


@dataclass(slots=True)
class AcceptanceEstimator:
    memory: Memory = field(default_factory=Memory)
    _overall: _Rate = field(default_factory=_Rate)
    _positions: dict[int, _Rate] = field(default_factory=dict)
    _departures: dict[str, _Departure] = field(default_factory=dict)

    def observe(self, outcome: Outcome) -> None:
        departure = self._departures.setdefault(outcome.seq_id, _Departure())
        for position in range(outcome.num_tested):
            is_accepted = position < outcome.num_accepted
            decay = 1.0 - 1.0 / self.memory.of_sequence
            departure.accepted = departure.accepted * decay + is_accepted
            departure.expected = departure.expected * decay + self._rate(position)
            departure.num_tested += 1
            self._overall.observe(is_accepted, self.memory.of_drafter)
            rate = self._positions.setdefault(position, _Rate())
            rate.observe(is_accepted, self.memory.of_drafter)

    def survival(self, seq_id: str, num_drafts: int, *, optimism: float = 0.0) -> list[float]:
        """The probability that the first 1, 2, ... drafts are all accepted.

        `optimism`: standard deviations of the drafter's rates to add to them.
        """
        weight = self.memory.sequence_prior
        departure = self._departures.get(seq_id, _Departure())
        factor = (departure.accepted + weight) / (departure.expected + weight)
        bonus = optimism * self._deviation()
        probabilities, product = [], 1.0
        for position in range(num_drafts):
            product *= min(0.99, self._rate(position) * factor + bonus)
            probabilities.append(product)
        return probabilities

    def num_tested(self, seq_id: str) -> int:
        """Of a sequence, since its start."""
        return self._departures.get(seq_id, _Departure()).num_tested

    def forget(self, seq_id: str) -> None:
        """A sequence has ended."""
        self._departures.pop(seq_id, None)

    def _rate(self, position: int) -> float:
        memory = self.memory
        overall = self._overall.shrunk_to(memory.first_guess, memory.first_guess_weight)
        return self._positions.get(position, _Rate()).shrunk_to(overall, memory.position_prior)

    def _deviation(self) -> float:
        """How uncertain the overall rate is."""
        memory = self.memory
        rate = self._overall.shrunk_to(memory.first_guess, memory.first_guess_weight)
        return math.sqrt(rate * (1 - rate) / (self._overall.tested + memory.first_guess_weight))
