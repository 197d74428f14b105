"""The token bucket, with a clock of the test's own."""

import random

import pytest

from deployments.router.tenants.token_bucket import TokenBucket


def test_it_begins_full_fills_by_its_rate_and_holds_no_more() -> None:
    bucket = TokenBucket(rate=2.0, capacity=5.0, now=100.0)
    assert bucket.level(100.0) == 5.0
    bucket.take(5.0, 100.0)
    assert bucket.level(101.5) == 3.0
    assert bucket.level(200.0) == 5.0


def test_the_wait_is_as_long_as_it_says() -> None:
    bucket = TokenBucket(rate=2.0, capacity=5.0, now=0.0)
    bucket.take(5.0, 0.0)
    wait_s = bucket.wait_s(3.0, 0.0)
    assert wait_s == 1.5
    assert bucket.wait_s(3.0, wait_s) == 0.0
    assert bucket.wait_s(3.0, wait_s - 0.1) == pytest.approx(0.1)
    assert bucket.full_in_s(0.0) == 2.5


def test_what_never_fits_waits_for_a_full_bucket_and_leaves_a_debt() -> None:
    bucket = TokenBucket(rate=1.0, capacity=10.0, now=0.0)
    assert bucket.wait_s(25.0, 0.0) == 0.0
    bucket.take(25.0, 0.0)
    assert bucket.level(0.0) == -15.0
    assert bucket.wait_s(1.0, 0.0) == 16.0


def test_what_is_put_back_is_there_again_and_never_too_much() -> None:
    bucket = TokenBucket(rate=1.0, capacity=10.0, now=0.0)
    bucket.take(8.0, 0.0)
    bucket.put_back(5.0, 1.0)
    assert bucket.level(1.0) == 8.0
    bucket.put_back(50.0, 1.0)
    assert bucket.level(1.0) == 10.0


@pytest.mark.parametrize("seed", range(20))
def test_no_stretch_of_time_lets_more_through_than_capacity_and_rate(seed: int) -> None:
    rng = random.Random(seed)
    rate, capacity = rng.uniform(0.1, 10), rng.uniform(1, 20)
    bucket, now, taken = TokenBucket(rate=rate, capacity=capacity, now=0.0), 0.0, []
    for _ in range(300):
        now += rng.expovariate(rate)
        amount = rng.uniform(0, capacity)
        if bucket.wait_s(amount, now) == 0.0:
            bucket.take(amount, now)
            taken.append((now, amount))
    assert taken
    for first in range(0, len(taken), 7):
        total = 0.0
        for at, amount in taken[first:]:
            total += amount
            assert total <= capacity + rate * (at - taken[first][0]) + 1e-6
