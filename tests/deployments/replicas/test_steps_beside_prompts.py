"""Which calls wait for a step when a long prompt comes beside running sequences."""

import asyncio
from collections.abc import Callable

import pytest

from tests.deployments.replicas.step_loops import Clock, Loop, make_request
from tests.fakes import answer_of
from workers.scheduler import MIN_PREFILL_CHUNK
from workers.types import Reply, VerifyResult


class Running:
    """Sequences that go on and on, each time after drafting for a second by the clock."""

    def __init__(self, loop: Loop, clock: Clock, *seq_ids: str) -> None:
        self.loop = loop
        self.clock = clock
        self.tokens = {seq_id: [5, 6, 7] for seq_id in seq_ids}
        self.num_cached = dict.fromkeys(seq_ids, 0)

    async def go_on(self) -> Reply[VerifyResult]:
        for _ in range(5):  # turns of the event loop, so that whatever does not wait begins
            await asyncio.sleep(0)
        self.clock.now += 1.0
        reply = await answer_of(
            self.loop,
            [
                make_request(seq_id, tokens[self.num_cached[seq_id] :], self.num_cached[seq_id])
                for seq_id, tokens in self.tokens.items()
            ],
        )
        for result in reply.results:
            tokens = self.tokens[result.seq_id]
            self.num_cached[result.seq_id] = len(tokens)
            tokens.append(result.tokens[0])
        return reply

    async def end(self, seq_id: str) -> None:
        self.tokens.pop(seq_id)
        self.loop.release([seq_id])
        await asyncio.sleep(0)  # that is heard before anything else


@pytest.fixture
async def slow_loop(
    start_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> tuple[Loop, Clock]:
    """Steps of 20 seconds, by the clock."""
    clock = Clock()
    loop = start_loop(clock)
    step = loop.worker.step

    def slow_step() -> tuple[list[VerifyResult], bool]:
        if loop.worker.num_waiting:
            clock.now += 20.0
        return step()

    monkeypatch.setattr(loop.worker, "step", slow_step)
    return loop, clock


async def test_running_sequences_are_in_every_step_of_a_long_prompt(
    slow_loop: tuple[Loop, Clock],
) -> None:
    loop, clock = slow_loop
    running = Running(loop, clock, "a")
    for _ in range(3):  # how soon they come back is learnt
        await running.go_on()
    before = loop.work.num_steps
    long = asyncio.create_task(answer_of(loop, [make_request("long", [8] * 150)]))
    num_rounds = 0
    while not long.done():
        await running.go_on()
        num_rounds += 1
    num_steps = loop.work.num_steps - before
    assert num_steps >= 9
    assert num_rounds >= num_steps - 1  # the last tokens of a prompt are as soon done as others


async def test_a_reply_says_how_much_of_prompts_the_next_step_will_run(
    slow_loop: tuple[Loop, Clock],
) -> None:
    loop, clock = slow_loop
    running = Running(loop, clock, "a")
    for _ in range(3):
        assert (await running.go_on()).num_prefill_tokens == 0
    long = asyncio.create_task(answer_of(loop, [make_request("long", [8] * 150)]))
    replies = []
    while not long.done():
        replies.append(await running.go_on())
    foretold = [reply.num_prefill_tokens for reply in replies]
    actual = [reply.num_tokens - 1 for reply in replies]
    assert foretold[:8] == actual[1:9] == [MIN_PREFILL_CHUNK] * 8
    assert foretold[-1] == 0


async def test_the_end_of_one_sequence_does_not_part_the_others_from_a_prompt(
    slow_loop: tuple[Loop, Clock],
) -> None:
    loop, clock = slow_loop
    running = Running(loop, clock, "a", "b", "c")
    for _ in range(3):
        await running.go_on()
    await running.end("c")
    prompt = asyncio.create_task(answer_of(loop, [make_request("prompt", [8] * 20)]))
    reply = await running.go_on()
    await prompt
    assert reply.num_tokens == 2 + MIN_PREFILL_CHUNK


async def test_nobody_is_waited_for_who_has_ended(slow_loop: tuple[Loop, Clock]) -> None:
    loop, clock = slow_loop
    running = Running(loop, clock, "a")
    for _ in range(3):
        await running.go_on()
    await running.end("a")
    before = loop.work.num_steps
    loop.submit([make_request("prompt", [8] * 20)], lambda _: None)
    for _ in range(5):
        await asyncio.sleep(0)
    assert loop.work.num_steps > before
