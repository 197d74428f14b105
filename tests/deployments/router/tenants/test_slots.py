"""Slots: who waits is woken in turn, who leaves makes room, who waits too long is told."""

import asyncio

import pytest

from deployments.router.tenants.keys import ANYBODY, Tenant
from deployments.router.tenants.slots import Slots
from workers.errors import QueueTimeoutError

ALICE, BOB = Tenant(name="alice"), Tenant(name="bob")


async def test_who_waits_has_the_slot_of_who_leaves() -> None:
    slots = Slots(1)
    order = []

    async def run(name: str) -> None:
        with slots.queue(ANYBODY, priority=0, num_tokens=1) as place:
            await place.wait_first()
            order.append(name)
            await asyncio.sleep(0)

    await asyncio.gather(*[run(name) for name in "abc"])
    assert order == ["a", "b", "c"]
    assert slots.num_waiting == 0


async def test_who_is_cancelled_while_it_waits_holds_nothing() -> None:
    slots = Slots(1)
    with slots.queue(ANYBODY, priority=0, num_tokens=1) as first:
        await first.wait_first()

        async def wait() -> None:
            with slots.queue(ANYBODY, priority=0, num_tokens=1) as place:
                await place.wait_first()

        waiting = [asyncio.create_task(wait()) for _ in range(3)]
        await asyncio.sleep(0)
        assert slots.num_waiting == 3
        for task in waiting[:2]:
            task.cancel()
        await asyncio.gather(*waiting[:2], return_exceptions=True)
        assert slots.num_waiting == 1
    await waiting[2]
    assert slots.num_waiting == 0


async def test_who_waits_too_long_is_told() -> None:
    slots = Slots(1, timeout_s=0.01)
    with (
        slots.queue(ANYBODY, priority=0, num_tokens=1) as first,
        slots.queue(ANYBODY, priority=0, num_tokens=1) as second,
    ):
        await first.wait_first()
        with pytest.raises(QueueTimeoutError, match=r"waited 0.01 s .*queue_timeout_s"):
            await second.wait_first()
    with slots.queue(ANYBODY, priority=0, num_tokens=1) as third:
        await third.wait_first()


async def test_who_has_to_give_way_is_woken_and_has_a_slot_again_later() -> None:
    slots = Slots(2)
    with (
        slots.queue(ALICE, priority=0, num_tokens=9) as first,
        slots.queue(ALICE, priority=0, num_tokens=9) as second,
    ):
        with slots.queue(BOB, priority=0, num_tokens=9) as other:
            await other.wait_first()
            assert first.has_slot.is_set()
            assert not first.interrupted.is_set()
            assert second.interrupted.is_set()
            assert not second.has_slot.is_set()
        assert second.has_slot.is_set()


async def test_who_steps_aside_lets_another_run_and_comes_back() -> None:
    slots = Slots(1)
    with (
        slots.queue(ALICE, priority=0, num_tokens=9) as first,
        slots.queue(ALICE, priority=0, num_tokens=9) as second,
    ):
        first.step_aside()
        assert second.has_slot.is_set()
        first.step_back()
        assert not first.has_slot.is_set()
        second.step_aside()
        assert first.has_slot.is_set()
    assert slots.num_waiting == 0
