"""The cases that stand for all combinations."""

from itertools import combinations, product

import pytest

from tests.covering import covering_cases


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2, 6, 2, 2), (3, 7, 2), (5, 4), (1, 3, 1)])
def test_any_two_values_meet_in_few_cases(sizes: tuple[int, ...]) -> None:
    cases = covering_cases(sizes)
    for one, other in combinations(range(len(sizes)), 2):
        met = {(case[one], case[other]) for case in cases}
        assert met == set(product(range(sizes[one]), range(sizes[other])))
    largest, second = sorted(sizes)[:-3:-1]
    assert largest * second <= len(cases) <= largest * second + 2


@pytest.mark.covering(number=[1, 2, 3], word={"one": "a", "two": "b"}, is_on=[False, True])
def test_the_mark_gives_them_to_a_test(
    number: int, word: str, is_on: bool, request: pytest.FixtureRequest
) -> None:
    assert (number in (1, 2, 3), word in "ab", is_on in (False, True)) == (True,) * 3
    names = {"a": "one", "b": "two"}
    assert request.node.callspec.id == f"{number}-{names[word]}-{is_on}"
