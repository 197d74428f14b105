"""Admission: a router takes so many completions at a time, and refuses further ones with 429.

A completion counts from before it is tokenized until it has ended, and what asks for the tokens of
a text alone counts as one completion. Where several keys share the
router, one of them may hold no more than it leaves free for the others: half of the room if it is
alone, less if others hold some too. What a key may use besides is its account's affair.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from deployments.router.tenants.account import Account, MeanTime, RateLimits
from deployments.router.tenants.keys import ANYBODY, Tenant
from workers.errors import InvalidRequestError, OverloadedError


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    max_running: int
    max_waiting: int
    queue_timeout_s: float | None = None
    """How long a completion may wait for its turn."""
    num_routers: int = 1
    """How many share the limits of a key."""

    @property
    def capacity(self) -> int:
        return self.max_running + self.max_waiting


class Admission:
    """Counts the completions that run or wait in one router, all of them and those of each key."""

    def __init__(
        self, limits: AdmissionLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._times = MeanTime()
        self.num_unfinished = 0

    def reserve(
        self, num_new: int, tenant: Tenant = ANYBODY, *, num_tenants: int = 1
    ) -> "Reservation":
        """Let a request of `num_new` completions in, as a whole, to be used as a context manager.

        The room is taken at once, so nothing may be awaited between this call and the `with`.
        Raises InvalidRequestError if the request can never fit, OverloadedError if it does not now.
        """
        account = self._account(tenant)
        self._check_room(num_new, account, is_shared=num_tenants > 1)
        account.enter(num_new, self._clock())
        return Reservation(self, account, num_new, clock=self._clock)

    def rate_limits(self, tenant: Tenant) -> RateLimits:
        """Where the limits of a key stand."""
        return self._account(tenant).rate_limits(self._clock())

    def ended(self, account: Account, num: int) -> None:
        """Give back the room of so many completions of an account."""
        self.num_unfinished -= num
        account.num_unfinished -= num

    def completed(self, account: Account, time_s: float) -> None:
        """Note how long a completion took, from its admission to its end."""
        self._times.add(time_s)
        account.times.add(time_s)

    def _account(self, tenant: Tenant) -> Account:
        now = self._clock()
        account = self._accounts.get(tenant.name)
        if account is None:
            account = Account(tenant, num_routers=self._limits.num_routers, now=now)
            self._accounts[tenant.name] = account
        elif account.tenant != tenant:  # its limits were changed
            account.use(tenant, now)
        return account

    def _check_room(self, num_new: int, account: Account, *, is_shared: bool) -> None:
        limits = self._limits
        most = limits.capacity // 2 if is_shared else limits.capacity
        if num_new > most:
            raise InvalidRequestError(
                f"the request asks for {num_new} completions (its prompts times n), but at most "
                f"{most} fit this server: {limits.max_running} run and {limits.max_waiting} wait"
                f"{', of which one key may have half' if is_shared else ''}; send fewer at a time",
                field="n",
            )
        num_free = limits.capacity - self.num_unfinished - num_new
        num_over = -num_free
        if is_shared:
            num_over = max(num_over, account.num_unfinished + num_new - num_free)
        if num_over > 0:
            whose = f", {account.num_unfinished} of them of this key" if is_shared else ""
            raise OverloadedError(
                f"{self.num_unfinished} completions are running or waiting{whose}, and {num_new} "
                f"more were asked for; at most {limits.max_running} run and {limits.max_waiting} "
                "wait at a time. Try again later",
                retry_after_s=self._times.until_ended_s(
                    num_over, num_unfinished=self.num_unfinished
                ),
            )


class Reservation:
    """Room for the completions of one request; what is still held at its end is given back."""

    def __init__(
        self, admission: Admission, account: Account, num_held: int, *, clock: Callable[[], float]
    ) -> None:
        self._admission = admission
        self._account = account
        self._num_held = num_held
        self._clock = clock
        self._began = clock()
        self._num_charged = 0
        admission.ended(account, -num_held)

    def charge(self, num_tokens: int) -> None:
        """Take the tokens that the request may need at most; raises RateLimitError."""
        self._account.charge(num_tokens, self._clock())
        self._num_charged = num_tokens

    def settle(self, num_used: int) -> None:
        """The request has used so many of the tokens that were taken for it."""
        self._account.give_back(self._num_charged - num_used, self._clock())
        self._num_charged = num_used

    def release_one(self) -> None:
        """One completion has finished; a request that has ended holds nothing any more."""
        if self._num_held:
            self._admission.completed(self._account, self._clock() - self._began)
            self._release(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._release(self._num_held)

    def _release(self, num: int) -> None:
        self._num_held -= num
        self._admission.ended(self._account, num)
