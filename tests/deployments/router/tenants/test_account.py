"""What one key may use in a router, with a clock of the test's own."""

import pytest

from deployments.router.tenants.account import Account, MeanTime
from deployments.router.tenants.keys import KeyLimits, Tenant
from workers.errors import InvalidRequestError, RateLimitError


def account(num_routers: int = 1, **limits: float) -> Account:
    tenant = Tenant(name="alice", limits=KeyLimits(**limits))
    return Account(tenant, num_routers=num_routers, now=0.0)


class TestRequests:
    def test_a_second_of_requests_comes_at_once_and_then_by_the_rate(self) -> None:
        alice = account(requests_per_second=3)
        for _ in range(3):
            alice.enter(1, 0.0)
        with pytest.raises(RateLimitError, match=r"'alice' may send 3 requests a second") as caught:
            alice.enter(1, 0.0)
        wait_s = caught.value.retry_after_s
        assert wait_s == pytest.approx(1 / 3)
        with pytest.raises(RateLimitError):
            alice.enter(1, wait_s - 0.01)
        alice.enter(1, wait_s + 0.001)

    def test_what_is_refused_is_not_counted(self) -> None:
        alice = account(requests_per_second=1)
        alice.enter(1, 0.0)
        for _ in range(50):
            with pytest.raises(RateLimitError):
                alice.enter(1, 0.5)
        alice.enter(1, 1.0)

    def test_less_than_one_a_second_is_one_at_once(self) -> None:
        alice = account(requests_per_second=0.5)
        alice.enter(1, 0.0)
        with pytest.raises(RateLimitError):
            alice.enter(1, 1.9)
        alice.enter(1, 2.0)

    def test_routers_share_a_limit(self) -> None:
        alice = account(num_routers=4, requests_per_second=8)
        alice.enter(1, 0.0)
        alice.enter(1, 0.0)
        with pytest.raises(RateLimitError):
            alice.enter(1, 0.0)


class TestTokens:
    def test_a_minute_of_tokens_comes_at_once_and_then_by_the_rate(self) -> None:
        alice = account(tokens_per_minute=600)
        alice.charge(500, 0.0)
        with pytest.raises(RateLimitError, match=r"600 tokens a minute.* may need 200") as caught:
            alice.charge(200, 0.0)
        assert caught.value.retry_after_s == pytest.approx(10.0)
        alice.charge(200, 10.0)

    def test_what_was_not_used_comes_back(self) -> None:
        alice = account(tokens_per_minute=600)
        alice.charge(600, 0.0)
        alice.give_back(550, 0.0)
        alice.charge(550, 0.0)

    def test_a_request_of_more_than_a_minute_is_not_refused_for_ever(self) -> None:
        alice = account(tokens_per_minute=60)
        alice.charge(120, 0.0)
        with pytest.raises(RateLimitError) as caught:
            alice.charge(1, 0.0)
        assert caught.value.retry_after_s == pytest.approx(61.0)

    def test_where_they_stand_is_told(self) -> None:
        alice = account(tokens_per_minute=600, requests_per_second=2)
        alice.enter(1, 0.0)
        alice.charge(60, 0.0)
        limits = alice.rate_limits(1.0)
        assert limits.tokens is not None
        assert limits.requests is not None
        assert (limits.tokens.limit, limits.tokens.remaining) == (600, 550)
        assert limits.tokens.reset_s == pytest.approx(5.0)
        assert (limits.requests.limit, limits.requests.remaining) == (2, 2)


class TestConcurrent:
    def test_no_more_completions_run_or_wait_than_may(self) -> None:
        alice = account(max_concurrent=4)
        alice.num_unfinished = 3
        alice.enter(1, 0.0)
        with pytest.raises(RateLimitError, match="4 completions at a time"):
            alice.enter(2, 0.0)
        with pytest.raises(InvalidRequestError, match=r"5 completions.* may have 4"):
            alice.enter(5, 0.0)

    def test_the_wait_is_as_long_as_completions_take_to_end(self) -> None:
        alice = account(max_concurrent=4)
        alice.num_unfinished = 4
        for _ in range(50):
            alice.times.add(20.0)
        with pytest.raises(RateLimitError) as caught:
            alice.enter(2, 0.0)
        assert caught.value.retry_after_s == pytest.approx(10.0)  # two ends, one each 20 / 4 s


def test_other_limits_hold_from_when_they_are_known() -> None:
    alice = account(requests_per_second=1)
    alice.enter(1, 0.0)
    alice.use(Tenant(name="alice", limits=KeyLimits(requests_per_second=5)), 0.0)
    for _ in range(5):
        alice.enter(1, 0.0)
    alice.use(Tenant(name="alice"), 0.0)
    for _ in range(100):
        alice.enter(1, 0.0)


def test_the_mean_time_follows_what_is_new_and_the_estimate_has_bounds() -> None:
    times = MeanTime()
    assert times.until_ended_s(5, num_unfinished=5) == 1.0
    for _ in range(100):
        times.add(4.0)
    assert times.until_ended_s(3, num_unfinished=6) == pytest.approx(2.0)
    for _ in range(100):
        times.add(1000.0)
    assert times.until_ended_s(6, num_unfinished=6) == 60.0
    assert times.until_ended_s(1, num_unfinished=10**6) == 1.0
