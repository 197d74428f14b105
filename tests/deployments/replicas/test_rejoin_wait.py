"""How long a worker waits for those it has just answered."""

import pytest

from deployments.replicas.rejoin_wait import RejoinWait


def after(*returns_s: float) -> RejoinWait:
    wait = RejoinWait()
    for return_s in returns_s:
        wait.observe(return_s)
    return wait


def test_nobody_is_waited_for_before_it_is_known_how_long() -> None:
    assert RejoinWait().limit_s(last_step_s=1.0) == 0.0


def test_callers_are_waited_for_a_little_longer_than_they_usually_take() -> None:
    assert 0.01 < after(*[0.01] * 20).limit_s(last_step_s=0.1) < 0.05


def test_who_takes_long_is_not_waited_for() -> None:
    assert after(0.06).limit_s(last_step_s=0.1) == 0.0


def test_who_stays_away_is_soon_not_waited_for() -> None:
    wait, num_waits = after(0.01), 0
    while limit_s := wait.limit_s(last_step_s=0.1):
        wait.observe(limit_s)
        num_waits += 1
    assert 0 < num_waits < 20


@pytest.mark.parametrize("soon_s", [0.002, 0.01])
def test_who_is_back_sooner_is_waited_for_again(soon_s: float) -> None:
    wait = after(0.3, *[soon_s] * 20)
    assert soon_s < wait.limit_s(last_step_s=0.1) < 0.05
