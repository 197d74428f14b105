"""What one key holds and has used in one router, and whether it may have more. Pure."""

import math
from dataclasses import dataclass

from deployments.router.tenants.keys import Tenant
from deployments.router.tenants.token_bucket import TokenBucket
from workers.errors import InvalidRequestError, RateLimitError

MINUTE_S = 60.0
MAX_RETRY_S = 60.0
NEW_SHARE = 0.2
"""How much the newest completion's time weighs in their mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """Where one limit of a key stands."""

    limit: int
    remaining: int
    reset_s: float
    """Seconds until all of it is there again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimits:
    """Where the limits of a key stand; None for what is not limited."""

    requests: RateLimit | None = None
    tokens: RateLimit | None = None


class MeanTime:
    """The time that completions take from their admission to their end, recent ones above all."""

    def __init__(self) -> None:
        self._mean_s: float | None = None

    def add(self, time_s: float) -> None:
        before = time_s if self._mean_s is None else self._mean_s
        self._mean_s = before + NEW_SHARE * (time_s - before)

    def until_ended_s(self, num_ends: int, *, num_unfinished: int) -> float:
        """Seconds until so many of the unfinished have ended.

        By Little's law, L completions that take W seconds each end at a rate of L / W. Never less
        than 1 s, which is also the answer as long as none has ended, and never over MAX_RETRY_S.
        """
        if self._mean_s is None or num_unfinished == 0:
            return 1.0
        return min(MAX_RETRY_S, max(1.0, num_ends * self._mean_s / num_unfinished))


class Account:
    """One key's completions, requests and tokens in one router of several, which share evenly.

    All times are seconds on one clock, which the caller reads.
    """

    def __init__(self, tenant: Tenant, *, num_routers: int, now: float) -> None:
        self._num_routers = num_routers
        self.num_unfinished = 0
        self.times = MeanTime()
        self.use(tenant, now)

    def use(self, tenant: Tenant, now: float) -> None:
        """Go on with other limits; buckets begin full."""
        self.tenant = tenant
        self._requests = self._tokens = None
        limits, num_routers = tenant.limits, self._num_routers
        if (per_second := limits.requests_per_second) is not None:
            rate = per_second / num_routers
            self._requests = TokenBucket(rate=rate, capacity=math.ceil(rate), now=now)
        if (per_minute := limits.tokens_per_minute) is not None:
            capacity = per_minute / num_routers
            self._tokens = TokenBucket(rate=capacity / MINUTE_S, capacity=capacity, now=now)

    @property
    def max_concurrent(self) -> int | None:
        """Completions at a time in this router."""
        most = self.tenant.limits.max_concurrent
        return None if most is None else math.ceil(most / self._num_routers)

    def enter(self, num_new: int, now: float) -> None:
        """A request of so many completions; raises RateLimitError where it has to come later."""
        self._check_concurrent(num_new)
        if self._requests is None:
            return
        if wait_s := self._requests.wait_s(1, now):
            per_second = self.tenant.limits.requests_per_second
            raise self._refusal(f"may send {per_second:g} requests a second", wait_s)
        self._requests.take(1, now)

    def charge(self, num_tokens: int, now: float) -> None:
        """Take the tokens that a request may need at most; raises RateLimitError.

        One that asks for more than a minute's waits until a whole minute's are there, and those
        after it wait the longer.
        """
        if self._tokens is None:
            return
        if wait_s := self._tokens.wait_s(num_tokens, now):
            raise self._refusal(
                f"may use {self.tenant.limits.tokens_per_minute} tokens a minute, and this request "
                f"may need {num_tokens}, its prompt and max_tokens together",
                wait_s,
            )
        self._tokens.take(num_tokens, now)

    def give_back(self, num_tokens: int, now: float) -> None:
        """Tokens that were taken and not used."""
        if self._tokens is not None:
            self._tokens.put_back(num_tokens, now)

    def rate_limits(self, now: float) -> RateLimits:
        return RateLimits(requests=_stand(self._requests, now), tokens=_stand(self._tokens, now))

    def _check_concurrent(self, num_new: int) -> None:
        most = self.max_concurrent
        if most is None or self.num_unfinished + num_new <= most:
            return
        if num_new > most:
            raise InvalidRequestError(
                f"the request asks for {num_new} completions (its prompts times n), but the key "
                f"{self.tenant.name!r} may have {most} at a time; send fewer at a time",
                field="n",
            )
        num_ends = self.num_unfinished + num_new - most
        wait_s = self.times.until_ended_s(num_ends, num_unfinished=self.num_unfinished)
        raise self._refusal(f"may have {most} completions at a time", wait_s)

    def _refusal(self, sentence: str, wait_s: float) -> RateLimitError:
        return RateLimitError(
            f"the key {self.tenant.name!r} {sentence}; try again in {wait_s:.3g} s",
            retry_after_s=wait_s,
        )


def _stand(bucket: TokenBucket | None, now: float) -> RateLimit | None:
    if bucket is None:
        return None
    return RateLimit(
        limit=int(bucket.capacity),
        remaining=max(0, int(bucket.level(now))),
        reset_s=bucket.full_in_s(now),
    )
