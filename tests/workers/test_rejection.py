"""The rules that compare laws, exactly: every draft and every chance, in fractions.

What a round emits, continued by the target alone, must have the target's law over whole texts.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

from workers.block_verification import decide_as_block
from workers.ratio_test import Decide
from workers.rejection import Decision, LawsAtDraft, decide_by_rejection, residual

RULES = [decide_by_rejection, decide_as_block]
VOCAB = range(3)

Text = tuple[int, ...]
Law = Callable[[Text], list[Fraction]]
"""The probability of each token behind a text."""
Stops = Callable[[Text], bool]


def weighted(*weights: int) -> list[Fraction]:
    return [Fraction(weight, sum(weights)) for weight in weights]


@cache
def target_law(text: Text) -> list[Fraction]:
    return weighted(*(1 + (3 * sum(text) + 2 * token + len(text)) % 5 for token in VOCAB))


@cache
def draft_law(text: Text) -> list[Fraction]:
    return weighted(*(1 + (sum(text) + 3 * token * token + 2 * len(text)) % 7 for token in VOCAB))


@cache
def truncated_law(text: Text) -> list[Fraction]:
    """A drafter's two likeliest tokens."""
    law = draft_law(text)
    least = min(VOCAB, key=law.__getitem__)
    return [(token != least) * law[token] / (1 - law[least]) for token in VOCAB]


@cache
def certain_law(text: Text) -> list[Fraction]:
    """That of a drafter without a choice."""
    return [Fraction(token == (sum(text) + len(text)) % 3) for token in VOCAB]


def mixed_law(text: Text) -> list[Fraction]:
    """One drafter goes on where another has ended."""
    return certain_law(text) if len(text) == 1 else draft_law(text)


@cache
def foreign_law(text: Text) -> list[Fraction]:
    """Half of it is a token that the target does not know."""
    return [*(probability / 2 for probability in draft_law(text)), Fraction(1, 2)]


LAWS = [draft_law, truncated_law, certain_law, mixed_law, target_law, foreign_law]
STOPS: dict[str, Stops] = {
    "at a length": lambda _: False,
    "behind a token": lambda text: text[-1] == 1,
    "behind an unlikely token": lambda text: draft_law(text[:-1])[text[-1] % 3] < Fraction(1, 3),
}


def drafts_of(q: Law, gamma: int, stops: Stops) -> Iterator[tuple[Text, Fraction]]:
    """All drafts that may be made, each with its probability."""
    pending: list[tuple[Text, Fraction]] = [((), Fraction(1))]
    while pending:
        drafts, probability = pending.pop()
        if len(drafts) == gamma or (drafts and stops(drafts)):
            yield drafts, probability
            continue
        for token, share in enumerate(q(drafts)):
            if share:
                pending.append(((*drafts, token), probability * share))


def laws_at(drafts: Text, p: Law, q: Law) -> list[LawsAtDraft]:
    laws = []
    for index, token in enumerate(drafts):
        drawable = [other for other, share in enumerate(q(drafts[:index])) if share]
        of_target = [*p(drafts[:index]), Fraction(0)]
        p_drawable = np.array([of_target[other] for other in drawable], dtype=object)
        q_drawable = np.array([q(drafts[:index])[other] for other in drawable], dtype=object)
        laws.append(
            LawsAtDraft(
                drafted=drawable.index(token),
                p=p_drawable,
                q=q_drawable,
                others=sum(of_target) - p_drawable.sum(),
            )
        )
    return laws


class Chances:
    """Takes each chance as a script says, and once that ends as if it happened."""

    def __init__(self, script: tuple[bool, ...]) -> None:
        self._script = script
        self.taken: list[bool] = []
        self.probability = Fraction(1)

    def __call__(self, _: int, chance: Fraction) -> bool:
        assert 0 <= chance <= 1
        index = len(self.taken)
        happens = self._script[index] if index < len(self._script) else True
        self.taken.append(happens)
        self.probability *= chance if happens else 1 - chance
        return happens

    @property
    def others(self) -> list[tuple[bool, ...]]:
        """The scripts that take another way behind this one's end."""
        new = range(len(self._script), len(self.taken))
        return [(*self.taken[:index], False) for index in new]


def decisions_of(
    decide: Decide, laws: Sequence[LawsAtDraft]
) -> Iterator[tuple[Decision, Fraction]]:
    """All decisions that a rule may make, each with its probability."""
    pending: list[tuple[bool, ...]] = [()]
    while pending:
        chances = Chances(pending.pop())
        decision = decide(laws, chances)
        pending += chances.others
        if chances.probability:
            yield decision, chances.probability


def last_law(drafts: Text, decision: Decision, p: Law, q: Law) -> list[Fraction]:
    """The law of the token behind the accepted drafts."""
    accepted = drafts[: decision.num_accepted]
    weights = list(p(accepted))
    if len(accepted) < len(drafts):
        left = residual(laws_at(drafts, p, q)[len(accepted)], decision.scale)
        drawable = [token for token, share in enumerate(q(accepted)) if share]
        for token, weight in zip(drawable, left, strict=True):
            if token in VOCAB:
                weights[token] = weight
    return [Fraction(weight) / sum(weights) for weight in weights]


@cache
def round_law(
    decide: Decide, p: Law, q: Law, gamma: int, stops: Stops
) -> tuple[dict[Text, Fraction], Fraction]:
    """What a round emits, and how many drafts it accepts on average."""
    emitted: dict[Text, Fraction] = {}
    num_accepted = Fraction(0)
    for drafts, drawn in drafts_of(q, gamma, stops):
        for decision, decided in decisions_of(decide, laws_at(drafts, p, q)):
            num_accepted += drawn * decided * decision.num_accepted
            for token, share in enumerate(last_law(drafts, decision, p, q)):
                text = (*drafts[: decision.num_accepted], token)
                emitted[text] = emitted.get(text, Fraction(0)) + drawn * decided * share
    return emitted, num_accepted


def probability_of(text: Text, p: Law) -> Fraction:
    probability = Fraction(1)
    for index, token in enumerate(text):
        probability *= p(text[:index])[token]
    return probability


@pytest.mark.parametrize("stops", STOPS)
@pytest.mark.parametrize("q", LAWS)
@pytest.mark.parametrize("gamma", [0, 1, 2, 3])
@pytest.mark.parametrize("decide", RULES)
def test_texts_have_the_targets_law(decide: Decide, gamma: int, q: Law, stops: str) -> None:
    emitted, _ = round_law(decide, target_law, q, gamma, STOPS[stops])
    assert sum(emitted.values()) == 1
    for text in itertools.product(VOCAB, repeat=gamma + 1):
        begun = [
            emitted.get(text[:length], Fraction(0))
            * probability_of(text, target_law)
            / probability_of(text[:length], target_law)
            for length in range(1, gamma + 2)
        ]
        assert sum(begun) == probability_of(text, target_law)


@pytest.mark.parametrize("decide", RULES)
def test_a_target_without_a_choice_is_followed(decide: Decide) -> None:
    """Probabilities of 0 divide nothing, and drafts that cannot be are never accepted."""
    emitted, _ = round_law(decide, certain_law, draft_law, 3, STOPS["at a length"])
    sure = (0,)
    while len(sure) < 4:
        sure += (certain_law(sure).index(1),)
    assert {text for text, probability in emitted.items() if probability} <= {
        sure[:length] for length in range(1, 5)
    }


@pytest.mark.parametrize("decide", RULES)
def test_a_token_that_none_may_follow_is_as_frequent_as_any(decide: Decide) -> None:
    """Bans may leave nothing behind a token; the text may end with it."""

    def p(text: Text) -> list[Fraction]:
        return [Fraction(0) for _ in VOCAB] if text and text[0] == 1 else target_law(text)

    first = [Fraction(0) for _ in VOCAB]
    for drafts, drawn in drafts_of(draft_law, 2, STOPS["at a length"]):
        for decision, decided in decisions_of(decide, laws_at(drafts, p, draft_law)):
            shares = [Fraction(token == drafts[0]) for token in VOCAB]
            if decision.num_accepted == 0:
                shares = last_law(drafts, decision, p, draft_law)
            first = [
                before + drawn * decided * share
                for before, share in zip(first, shares, strict=True)
            ]
    assert first == target_law(())


@pytest.mark.parametrize("decide", RULES)
def test_one_draft_is_accepted_as_far_as_the_laws_overlap(decide: Decide) -> None:
    for q in LAWS:
        _, num_accepted = round_law(decide, target_law, q, 1, STOPS["at a length"])
        assert num_accepted == sum(map(min, target_law(()), q(())))


@pytest.mark.parametrize("decide", RULES)
def test_drafts_of_the_targets_own_law_are_all_accepted(decide: Decide) -> None:
    _, num_accepted = round_law(decide, target_law, target_law, 3, STOPS["at a length"])
    assert num_accepted == 3


def test_where_nothing_is_left_of_the_law_it_is_taken_whole() -> None:
    """Equal laws leave no residual; a rejection that rounding alone can bring draws from p."""
    (law, *_) = laws_at((0,), target_law, target_law)
    assert list(residual(law, 1)) == target_law(())


def test_block_verification_accepts_what_its_paper_says() -> None:
    """Two tokens, two drafts: 10 / 9 accepted one by one, 11 / 9 as a block."""

    def p(_: Text) -> list[Fraction]:
        return [Fraction(1, 3), Fraction(2, 3), Fraction(0)]

    def q(_: Text) -> list[Fraction]:
        return [Fraction(2, 3), Fraction(1, 3), Fraction(0)]

    accepted = [round_law(decide, p, q, 2, STOPS["at a length"])[1] for decide in RULES]
    assert accepted == [Fraction(10, 9), Fraction(11, 9)]


@pytest.mark.parametrize("stops", STOPS)
@pytest.mark.parametrize("q", LAWS)
def test_a_block_has_no_fewer_accepted_drafts(q: Law, stops: str) -> None:
    one_by_one, as_block = (
        round_law(decide, target_law, q, 3, STOPS[stops])[1] for decide in RULES
    )
    assert as_block >= one_by_one
