"""When a serving worker times its steps anew."""

import pytest

from deployments.replicas.background_timing import TIMING_SHARE, BackgroundTiming


class Table:
    """Outdated for so many steps of half a second."""

    def __init__(self, num_steps: int) -> None:
        self.num_left = num_steps

    @property
    def is_outdated(self) -> bool:
        return self.num_left > 0

    def time_one_step(self) -> float:
        self.num_left -= 1
        return 0.5


def test_an_idle_worker_times_all_at_once() -> None:
    timing = BackgroundTiming(Table(3))
    num_steps = 0
    while timing.is_due(busy_s=1.0, is_idle=True):
        timing.time_one_step(busy_s=1.0)
        num_steps += 1
    assert num_steps == 3


def test_beside_calls_it_takes_a_small_share_of_the_time() -> None:
    timing, busy_s, timed_s = BackgroundTiming(Table(1000)), 0.0, 0.0
    for _ in range(10_000):  # steps of calls, of 10 ms each
        if timing.is_due(busy_s=busy_s, is_idle=False):
            timing.time_one_step(busy_s=busy_s)
            timed_s += 0.5
        busy_s += 0.01
    assert timed_s == pytest.approx(TIMING_SHARE * busy_s, rel=0.15)


def test_a_table_that_is_up_to_date_is_left_alone() -> None:
    assert not BackgroundTiming(Table(0)).is_due(busy_s=100.0, is_idle=True)
