"""The slots in which completions run: who has one, who waits, and who has to give way."""

import asyncio
from types import TracebackType
from typing import Self

from deployments.router.tenants.fair_queue import Claim, FairQueue
from deployments.router.tenants.keys import Tenant
from workers.errors import QueueTimeoutError


class Slots:
    """The slots of one router."""

    def __init__(self, num_slots: int, *, timeout_s: float | None = None) -> None:
        """A completion fails that waits longer than `timeout_s` for its first slot."""
        self._queue = FairQueue(num_slots)
        self._places: dict[Claim, Place] = {}
        self.timeout_s = timeout_s

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting

    def queue(self, tenant: Tenant, *, priority: int, num_tokens: int) -> "Place":
        """A place in the queue for one completion, to be used as a context manager."""
        return Place(self, Claim(tenant=tenant, priority=priority, num_tokens=num_tokens))

    def _join(self, place: "Place") -> None:
        self._places[place.claim] = place
        self._queue.join(place.claim)
        self._settle()

    def _leave(self, place: "Place", num_used: int) -> None:
        if self._places.pop(place.claim, None) is not None:  # it may have stepped aside
            self._queue.leave(place.claim, num_used=num_used)
            self._settle()

    def _settle(self) -> None:
        """Hand out what is free, and what some have to give up for others."""
        while True:
            if (claim := self._queue.start_next()) is not None:
                self._places[claim].has_slot.set()
            elif (claim := self._queue.suspend_one()) is not None:
                place = self._places[claim]
                place.has_slot.clear()
                place.interrupted.set()
            else:
                return


class Place:
    """One completion's place: it waits for a slot, runs in it, and may have to wait again."""

    def __init__(self, slots: Slots, claim: Claim) -> None:
        self._slots = slots
        self.claim = claim
        self.has_slot = asyncio.Event()
        self.interrupted = asyncio.Event()
        """Set when the slot is lost, and by whoever has another reason to wake its owner."""
        self.num_used = 0
        """Tokens that the completion has used, when it ends."""

    def __enter__(self) -> Self:
        self._slots._join(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._slots._leave(self, self.num_used)

    async def wait_first(self) -> None:
        """Wait for the first slot; raises QueueTimeoutError when that takes too long."""
        try:
            async with asyncio.timeout(self._slots.timeout_s):
                await self.has_slot.wait()
        except TimeoutError:
            raise QueueTimeoutError(
                f"the request has waited {self._slots.timeout_s:g} s for its turn (the option "
                "queue_timeout_s), while others ran; try again later",
                retry_after_s=1,
            ) from None

    def step_aside(self) -> None:
        """Neither run nor wait, until `step_back`."""
        self.has_slot.clear()
        self._slots._leave(self, 0)

    def step_back(self) -> None:
        """Wait again, at the place that it had."""
        self._slots._join(self)
