"""How often guesses by a match were right, which is how sure the next ones are.

A match is an earlier place that reads as the end of a text does. How far back it agrees, and how
often such places were seen, says how likely the text goes on as it did there. The rates are
measured over all sequences and whether or not the guesses were verified, so that a drafter that has
been silent is heard again once it is right.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from typing import NamedTuple

from workers.types import DraftTokens

MAX_MATCH_LEN = 16
"""Tokens that are compared: agreement further back would not make a place more likely."""
MANY_PLACES = 4
"""Places that are told apart by their number; of more, each makes little difference."""
LEARNING_RATE = 0.02
"""Share of each new observation in a rate."""
SURE = 0.8
"""How likely drafts have to be right where another drafter would speak instead."""


class Guess(NamedTuple):
    """A token that was foreseen."""

    token: int
    length: int
    """Tokens before it that agreed with the places by which it was foreseen."""
    num_places: int = 1
    """The number of those places."""
    share: float = 1.0
    """The share of those places at which this token followed."""


class MatchAccuracy:
    """P(a guess is right), by the length and the number of its matches, as measured of late."""

    def __init__(self, *, head_start: int = 0) -> None:
        """A match of n tokens is expected to go on for n more before it ends, and `head_start`."""
        self._rates = [
            [(n := length * count + head_start) / (n + 1) for length in range(MAX_MATCH_LEN + 1)]
            for count in range(MANY_PLACES + 1)
        ]

    def of(self, guess: Guess) -> float:
        """The probability that a guess is right, if those before it are."""
        rate = self._rates[min(guess.num_places, MANY_PLACES)][min(guess.length, MAX_MATCH_LEN)]
        return min(1.0, rate * guess.share)

    def learn(self, guesses: Iterable[Guess], committed: Tokens[int]) -> None:
        """Compare guesses with what was committed in their places, up to the first difference."""
        for guess, token in zip(guesses, committed, strict=False):
            rates = self._rates[min(guess.num_places, MANY_PLACES)]
            error = (guess.token == token) - self.of(guess)
            rates[min(guess.length, MAX_MATCH_LEN)] += LEARNING_RATE * guess.share * error
            if guess.token != token:
                break


def expected_len(drafts: DraftTokens) -> float:
    """How many of these drafts will be accepted, on average: sum_j prod_{i <= j} confidence_i."""
    survival, total = 1.0, 0.0
    for confidence in drafts.confidences:
        survival *= confidence
        total += survival
    return total


def is_sure(drafts: DraftTokens, max_tokens: int) -> bool:
    """Whether as much is expected of drafts as if all that may be were SURE, one by one."""
    return expected_len(drafts) >= SURE * (1.0 - SURE**max_tokens) / (1.0 - SURE)
