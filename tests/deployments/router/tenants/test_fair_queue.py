"""How keys share slots: none starves, weights hold, a flood delays nobody else. Pure, no clock."""

import heapq
import random
from collections import Counter
from collections.abc import Callable

import pytest

from deployments.router.tenants.fair_queue import Claim, FairQueue
from deployments.router.tenants.keys import Tenant

ALICE, BOB = Tenant(name="alice"), Tenant(name="bob")


def claim(tenant: Tenant, *, num_tokens: int = 10, priority: int = 0) -> Claim:
    return Claim(tenant=tenant, priority=priority, num_tokens=num_tokens)


def start_all(queue: FairQueue) -> list[Claim]:
    """Start what may start, and have those give way that have to."""
    started = []
    while True:
        if (new := queue.start_next()) is not None:
            started.append(new)
        elif queue.suspend_one() is None:
            return started


def test_one_tenant_has_all_slots_in_the_order_of_its_claims() -> None:
    queue = FairQueue(2)
    claims = [claim(ALICE) for _ in range(4)]
    for each in claims:
        queue.join(each)
    assert start_all(queue) == claims[:2]
    queue.leave(claims[1], num_used=10)
    assert start_all(queue) == [claims[2]]
    assert (queue.num_running, queue.num_waiting) == (2, 1)


def test_a_lower_priority_is_earlier_within_a_key_only() -> None:
    queue = FairQueue(1)
    running = claim(ALICE)
    late, early, first = claim(ALICE, priority=5), claim(ALICE), claim(ALICE, priority=-1)
    of_bob = claim(BOB, priority=9)
    queue.join(running)
    assert start_all(queue) == [running]
    for each in (late, early, first, of_bob):
        queue.join(each)
    order = []
    for _ in range(4):
        queue.leave(running, num_used=10)
        (running,) = start_all(queue)
        order.append(running)
    assert order.index(of_bob) <= 1  # whatever the priorities of alice are
    order.remove(of_bob)
    assert order == [first, early, late]


def test_a_flood_gives_way_to_a_quiet_key_at_once() -> None:
    queue = FairQueue(4)
    flood = [claim(ALICE, num_tokens=1000) for _ in range(100)]
    for each in flood:
        queue.join(each)
    assert start_all(queue) == flood[:4]
    quiet = [claim(BOB, num_tokens=1000) for _ in range(3)]
    queue.join(quiet[0])
    assert start_all(queue) == [quiet[0]]  # and the youngest of the flood waits again
    queue.join(quiet[1])
    assert start_all(queue) == [quiet[1]]
    queue.join(quiet[2])
    assert start_all(queue) == []  # each has its half
    queue.leave(quiet[0], num_used=5)
    queue.leave(quiet[1], num_used=5)
    assert start_all(queue) == [quiet[2], flood[2]]  # who gave way is first of its key


def test_a_tenant_without_need_leaves_its_slots_to_others() -> None:
    queue = FairQueue(4)
    queue.join(only := claim(BOB))
    flood = [claim(ALICE) for _ in range(10)]
    for each in flood:
        queue.join(each)
    assert start_all(queue) == [only, *flood[:3]]


def test_a_claim_that_stepped_aside_has_its_place_again() -> None:
    queue = FairQueue(1)
    first, second, third = (claim(ALICE) for _ in range(3))
    for each in (first, second, third):
        queue.join(each)
    start_all(queue)
    queue.leave(first, num_used=0)
    assert start_all(queue) == [second]
    queue.join(first)
    queue.leave(second, num_used=10)
    assert start_all(queue) == [first]


def simulate(
    seed: int, *, num_slots: int, tenants: list[Tenant], length: Callable[[Tenant], int]
) -> tuple[Counter[str], int]:
    """Keep a backlog of every tenant; a running claim gets one token per step, as rounds give.

    Returns the tokens of each, and the longest time that a claim of the head waited, in ends of
    other claims.
    """
    rng = random.Random(seed)
    queue = FairQueue(num_slots)
    progress: dict[Claim, int] = {}
    running: set[Claim] = set()
    served: Counter[str] = Counter()
    waited: Counter[str] = Counter()
    longest = 0

    def add(tenant: Tenant) -> None:
        new = claim(tenant, num_tokens=length(tenant), priority=rng.randrange(3))
        progress[new] = rng.randint(1, new.num_tokens)  # many end before they must
        queue.join(new)

    def settle() -> None:
        while True:
            if (new := queue.start_next()) is not None:
                running.add(new)
                waited[new.tenant.name] = 0
            elif (lost := queue.suspend_one()) is not None:
                running.discard(lost)
            else:
                return

    for tenant in tenants:
        for _ in range(num_slots + 2):
            add(tenant)
    used: Counter[Claim] = Counter()
    for _ in range(6000):
        settle()
        assert len(running) == queue.num_running == num_slots
        for each in list(running):
            used[each] += 1
            served[each.tenant.name] += 1
            if used[each] < progress[each]:
                continue
            running.discard(each)
            queue.leave(each, num_used=used[each])
            add(each.tenant)
            for tenant in tenants:
                waited[tenant.name] += 1
            longest = max(longest, *waited.values())
    return served, longest


@pytest.mark.parametrize("seed", range(12))
def test_no_key_starves_and_weights_hold(seed: int) -> None:
    rng = random.Random(seed)
    tenants = [
        Tenant(name=f"t{index}", weight=rng.choice([1, 1, 2, 3, 0.5]))
        for index in range(rng.randint(2, 5))
    ]
    lengths = {tenant.name: rng.choice([5, 20, 80]) for tenant in tenants}
    num_slots = rng.choice([1, 2, 3, 8, 16])
    served, longest = simulate(
        seed, num_slots=num_slots, tenants=tenants, length=lambda tenant: lengths[tenant.name]
    )
    total = sum(tenant.weight for tenant in tenants)
    for tenant in tenants:
        share = served[tenant.name] / sum(served.values())
        assert share == pytest.approx(tenant.weight / total, rel=0.25), tenant
    assert longest < 40 * total / min(tenant.weight for tenant in tenants)


@pytest.mark.parametrize("seed", range(20))
def test_every_claim_is_started_once_the_others_end(seed: int) -> None:
    """Whoever comes and leaves when: in the end nothing waits and nothing is held."""
    rng = random.Random(seed)
    queue = FairQueue(rng.randint(1, 6))
    tenants = [Tenant(name=f"t{index}", weight=rng.uniform(0.1, 5)) for index in range(4)]
    present: list[tuple[float, int, Claim]] = []
    started: set[Claim] = set()
    for number in range(200):
        if rng.random() < 0.6:
            new = claim(rng.choice(tenants), num_tokens=rng.randint(1, 500))
            queue.join(new)
            heapq.heappush(present, (rng.random(), number, new))
        elif present:
            _, _, gone = heapq.heappop(present)  # whether it runs or waits
            queue.leave(gone, num_used=rng.randint(0, 500))
        started.update(start_all(queue))
        assert queue.num_running + queue.num_waiting == len(present)
        assert queue.num_waiting == 0 or queue.num_running == queue._num_slots
    while present:
        runs = [entry for entry in present if entry[2] in started]
        assert runs
        entry = rng.choice(runs)
        present.remove(entry)
        queue.leave(entry[2], num_used=1)
        started.update(start_all(queue))
    assert (queue.num_running, queue.num_waiting) == (0, 0)
