"""How long a worker waits for those it has just answered."""

import pytest

from deployments.replicas.linger import Linger


def after(*returns_s: float) -> Linger:
    linger = Linger()
    for return_s in returns_s:
        linger.observe(return_s)
    return linger


def test_nobody_is_waited_for_before_it_is_known_how_long() -> None:
    assert Linger().limit_s(last_step_s=1.0) == 0.0


def test_callers_are_waited_for_a_little_longer_than_they_usually_take() -> None:
    assert 0.01 < after(*[0.01] * 20).limit_s(last_step_s=0.1) < 0.05


def test_who_takes_long_is_not_waited_for() -> None:
    assert after(0.06).limit_s(last_step_s=0.1) == 0.0


def test_who_stays_away_is_soon_not_waited_for() -> None:
    linger, num_waits = after(0.01), 0
    while limit_s := linger.limit_s(last_step_s=0.1):
        linger.observe(limit_s)
        num_waits += 1
    assert 0 < num_waits < 20


@pytest.mark.parametrize("soon_s", [0.002, 0.01])
def test_who_is_back_sooner_is_waited_for_again(soon_s: float) -> None:
    linger = after(0.3, *[soon_s] * 20)
    assert soon_s < linger.limit_s(last_step_s=0.1) < 0.05
