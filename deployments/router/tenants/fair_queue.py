"""How the keys share the slots of a router, in which completions run. Pure.

Each tenant that runs or waits has a share of the slots by its weight, w_i / sum(w) of them. A slot
goes first to a tenant that has fewer whole ones than its share. What is left over, fractions and
the slots of tenants that need fewer, goes by start-time fair queueing (Goyal, Vin, Cheng 1996): to
the tenant with the lowest start tag S_i, which grows by tokens / w_i with each completion that it
starts, and begins at the tag V of the last one started where the tenant had nothing to start. What
a completion was charged and did not use comes off the tag again.

Where none is free, a tenant below its share gets a slot from one that is above its own by a whole
one: that tenant's latest completion of the lowest priority waits again, for the next of its turns.

Within a tenant the lowest `priority` is first, and the first that came among equal ones.
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from deployments.router.tenants.keys import Tenant


@dataclass(slots=True, kw_only=True, eq=False)
class Claim:
    """One completion's claim to a slot."""

    tenant: Tenant
    priority: int
    num_tokens: int
    """Tokens that it may need: its prompt's and as many as it may have."""
    number: int | None = None
    """How many claims came before it; None until it has come."""

    @property
    def order(self) -> tuple[int, int]:
        """The claim's place among those of its tenant: the lowest is first."""
        assert self.number is not None
        return self.priority, self.number


@dataclass(slots=True, kw_only=True)
class _Flow:
    """The claims of one tenant."""

    weight: float
    start_tag: float
    """The tag of the next claim that it starts."""
    waiting: list[Claim] = field(default_factory=list)
    """The claims that wait, in their order."""
    running: set[Claim] = field(default_factory=set)

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running)


class FairQueue:
    """Which claims have a slot and which wait for one."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._flows: dict[str, _Flow] = {}
        """The flows of tenants that run or wait, and of others while their tags still count."""
        self._virtual_time = 0.0
        self._num_claims = 0

    @property
    def num_waiting(self) -> int:
        return sum(len(flow.waiting) for flow in self._flows.values())

    @property
    def num_running(self) -> int:
        return sum(len(flow.running) for flow in self._flows.values())

    def join(self, claim: Claim) -> None:
        """A claim waits for a slot; one that was here before has its old place."""
        if claim.number is None:
            claim.number = self._num_claims
            self._num_claims += 1
        self._wait(claim)

    def give_up(self, claim: Claim) -> None:
        """A claim that has a slot waits for another one, at the place that it had."""
        flow = self._flows[claim.tenant.name]
        flow.running.remove(claim)
        self._settle(flow, claim, num_used=0)
        self._wait(claim)

    def leave(self, claim: Claim, *, num_used: int) -> None:
        """A claim that has ended or is given up: it has used so many tokens of its slot."""
        flow = self._flows[claim.tenant.name]
        if claim in flow.running:
            flow.running.remove(claim)
            self._settle(flow, claim, num_used=num_used)
        else:
            flow.waiting.remove(claim)
        if flow.is_idle and flow.start_tag <= self._virtual_time:
            del self._flows[claim.tenant.name]

    def start_next(self) -> Claim | None:
        """Give a free slot to the claim whose turn it is; None without either."""
        if self.num_running >= self._num_slots:
            return None
        flows = [flow for flow in self._flows.values() if flow.waiting]
        if not flows:
            return None
        flow = min(self._short(flows) or flows, key=_turn)
        claim = flow.waiting.pop(0)
        flow.running.add(claim)
        self._virtual_time = max(self._virtual_time, flow.start_tag)
        flow.start_tag += claim.num_tokens / flow.weight
        return claim

    def suspend_one(self) -> Claim | None:
        """Take a slot from a tenant that is above its share for one that is below.

        Returns the claim that waits again; None while nobody has to give way.
        """
        if self.num_running < self._num_slots:
            return None
        waiting = [flow for flow in self._flows.values() if flow.waiting]
        if not waiting or not self._short(waiting):
            return None
        above = self._above()
        if not above:
            return None
        flow = max(above, key=lambda flow: len(flow.running) / flow.weight)
        claim = max(flow.running, key=lambda claim: claim.order)
        self.give_up(claim)
        return claim

    def _wait(self, claim: Claim) -> None:
        flow = self._flows.get(claim.tenant.name)
        if flow is None:
            flow = _Flow(weight=claim.tenant.weight, start_tag=self._virtual_time)
            self._flows[claim.tenant.name] = flow
        flow.weight = claim.tenant.weight
        if not flow.waiting:
            flow.start_tag = max(flow.start_tag, self._virtual_time)
        insort(flow.waiting, claim, key=lambda claim: claim.order)

    def _settle(self, flow: _Flow, claim: Claim, *, num_used: int) -> None:
        """Take back what a claim was charged and did not use."""
        flow.start_tag -= max(0, claim.num_tokens - num_used) / flow.weight

    def _short(self, flows: Iterable[_Flow]) -> list[_Flow]:
        """The flows that stay within their share with one slot more."""
        share = self._share_of_one()
        return [flow for flow in flows if len(flow.running) + 1 <= share * flow.weight]

    def _above(self) -> list[_Flow]:
        """The flows that still have their share with one slot less."""
        share = self._share_of_one()
        flows = self._flows.values()
        return [flow for flow in flows if len(flow.running) - 1 >= share * flow.weight]

    def _share_of_one(self) -> float:
        """The slots that belong to a tenant of weight 1."""
        weights = [flow.weight for flow in self._flows.values() if not flow.is_idle]
        return self._num_slots / sum(weights)


def _turn(flow: _Flow) -> tuple[float, int]:
    return flow.start_tag, flow.waiting[0].number or 0
