"""Completions that take turns: who gives way, whose reader is slow, who waits; texts stay exact."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from deployments.router.completion import MAX_UNREAD
from deployments.router.request import Caller
from deployments.router.sequence import GenerationParams
from deployments.router.tenants.keys import ApiKey, KeyRing, Keys, Tenant, digest_of
from tests.deployments.loops import (
    Models,
    Stream,
    make_params,
    model_drafts,
    running_loop,
    wait_until,
)
from tests.deployments.serving import (
    LocalServing,
    body,
    client_of,
    complete,
    generation_request,
    local_serving,
    stream,
)
from workers.errors import OverloadedError

ALICE, BOB = Caller(tenant=Tenant(name="alice")), Caller(tenant=Tenant(name="bob"))


def two_keys() -> Keys:
    return Keys(
        KeyRing(
            [
                ApiKey(digest=digest_of(caller.tenant.name), tenant=caller.tenant)
                for caller in (ALICE, BOB)
            ]
        )
    )


@pytest.mark.parametrize("overlap", [False, True])
async def test_a_sequence_that_leaves_the_rounds_and_comes_back_has_the_same_text(
    overlap: bool, models: Models, all_params: list[GenerationParams], plain: list[list[int]]
) -> None:
    rng = random.Random(4)
    drafts = model_drafts(models)
    async with running_loop(models, overlap=overlap, drafts=drafts) as (loop, targets, observer):

        async def run(params: GenerationParams) -> Stream:
            stream = Stream(params)
            while not stream.sequence.is_done:
                loop.add(stream.sequence)
                await asyncio.wait(
                    [asyncio.create_task(stream.sequence.done.wait())],
                    timeout=rng.uniform(0, 0.05),
                )
                await loop.suspend(stream.sequence)
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.uniform(0, 0.03))
            return stream

        streams = await asyncio.gather(*map(run, all_params[::2]))
        assert [stream.token_ids for stream in streams] == plain[::2]
        assert loop.num_live == observer.num_live == 0
        await wait_until(lambda: targets.num_used_blocks + drafts.num_used_blocks == 0)


async def test_what_is_suspended_holds_nothing(models: Models) -> None:
    async with local_serving(models.target) as serving:
        stream = Stream(
            GenerationParams(
                prompt=(5, 6, 7),
                max_tokens=200,
                sampling=generation_request().sampling,
                seed=1,
                ignore_eos=True,
            )
        )
        serving.loop.add(stream.sequence)
        await stream.first_delta.wait()
        await serving.loop.suspend(stream.sequence)
        num_tokens = len(stream.sequence.tokens)
        await serving.wait_until_nothing_is_held()
        assert len(stream.sequence.tokens) == num_tokens
        await serving.loop.suspend(stream.sequence)  # which changes nothing
        serving.loop.cancel(stream.sequence)


async def test_what_is_cancelled_while_it_is_suspended_is_freed_by_drafters_too(
    models: Models,
) -> None:
    """A drafter that was catching up when it left the rounds has it only afterwards."""
    drafts = model_drafts(models)
    drafts.delay_s = 0.3
    async with running_loop(models, drafts=drafts) as (loop, _, _):
        stream = Stream(make_params(8, max_tokens=200))
        loop.add(stream.sequence)
        await stream.first_delta.wait()
        await loop.suspend(stream.sequence)
        await wait_until(lambda: drafts.num_used_blocks > 0)
        loop.cancel(stream.sequence)
        await wait_until(lambda: drafts.num_used_blocks == drafts.num_sequences == 0)


class TestFairness:
    async def test_a_flood_does_not_delay_a_quiet_keys_first_token(self, models: Models) -> None:
        """It runs in the next rounds, whatever waits; the flood's texts are none the worse."""
        num_tokens, num_floods = 120, 10
        async with (
            local_serving(models.target) as alone,
            client_of(alone) as client,
        ):
            expected = (await complete(client, max_tokens=num_tokens))["choices"][0]["text"]
        async with local_serving(
            models.target, max_running=4, max_waiting=60, gamma=0, keys=two_keys()
        ) as serving:

            async def flood() -> str:
                request = generation_request(max_tokens=num_tokens)
                async with serving.service.open(request, ALICE) as generation:
                    (whole,) = await generation.complete()
                    return whole.text

            floods = [asyncio.create_task(flood()) for _ in range(num_floods)]
            await wait_until(lambda: serving.loop.num_live == 4)
            for _ in range(5):
                num_calls = len(serving.targets.calls)
                request = generation_request(max_tokens=5)
                async with serving.service.open(request, BOB) as generation:
                    await anext(generation.run())
                # one that runs, its own, and what others have meanwhile: not all rounds of a text
                assert len(serving.targets.calls) - num_calls <= num_tokens // 3
            assert not any(task.done() for task in floods[:4])
            assert [await task for task in floods] == [expected] * num_floods
            await serving.wait_until_nothing_is_held()

    async def test_workers_are_told_whose_a_sequence_is(self, models: Models) -> None:
        """Their prompts take turns by that."""
        carol = Caller(tenant=Tenant(name="carol", weight=3.0))
        request = generation_request(max_tokens=40)
        async with local_serving(models.target) as serving:
            async with serving.service.open(request, carol) as generation:
                await generation.complete()
            assert serving.targets.calls
            assert serving.drafts.calls
            calls = serving.targets.calls + serving.drafts.calls
        asked = [request for call in calls for request in call]
        assert {(request.tenant, request.weight) for request in asked} == {("carol", 3.0)}

    async def test_a_flood_leaves_room_in_the_queue(self, models: Models) -> None:
        async with local_serving(
            models.target, max_running=2, max_waiting=18, keys=two_keys()
        ) as serving:
            async with AsyncExitStack() as opened:
                for _ in range(10):
                    context = serving.service.open(generation_request(), ALICE)
                    await opened.enter_async_context(context)
                with pytest.raises(OverloadedError, match="10 of them of this key") as caught:
                    await opened.enter_async_context(
                        serving.service.open(generation_request(), ALICE)
                    )
                assert caught.value.retry_after_s >= 1
                async with serving.service.open(generation_request(n=5), BOB) as generation:
                    await generation.complete()
            assert serving.service.num_unfinished == 0

    async def test_a_lower_priority_value_runs_first(self, models: Models) -> None:
        async with (
            local_serving(models.target, max_running=1) as serving,
            client_of(serving) as client,
        ):
            order = []

            async def ask(priority: int) -> None:
                await complete(client, max_tokens=30, priority=priority)
                order.append(priority)

            serving.targets.delay_s = 0.1
            tasks = [asyncio.create_task(ask(99))]
            await wait_until(lambda: serving.loop.num_live == 1)
            tasks += [asyncio.create_task(ask(priority)) for priority in (3, 1, 2, -5)]
            await wait_until(lambda: serving.service.num_waiting == 4)
            serving.targets.delay_s = 0.0
            await asyncio.gather(*tasks)
            assert order == [99, -5, 1, 2, 3]


class TestSlowReaders:
    async def test_one_that_does_not_read_stands_still_and_holds_up_nobody(
        self, models: Models
    ) -> None:
        async with (
            local_serving(models.target, max_running=1, gamma=0) as serving,
            client_of(serving) as client,
        ):
            expected = (await complete(client, max_tokens=200))["choices"][0]["text"]
            request = generation_request(max_tokens=200)
            async with serving.service.open(request) as generation:
                deltas = generation.run()
                text = (await anext(deltas))[1].text
                await wait_until(lambda: serving.loop.num_live == 0)
                (completion,) = generation.completions
                assert completion.sequence.num_output_tokens <= MAX_UNREAD + 4
                await complete(client, max_tokens=5)  # has the only slot meanwhile
                assert completion.sequence.num_output_tokens <= MAX_UNREAD + 4
                async for _, delta in deltas:
                    text += delta.text
            assert text == expected
            await serving.wait_until_nothing_is_held()

    async def test_one_that_leaves_instead_of_reading_holds_nothing(self, models: Models) -> None:
        async with local_serving(models.target, gamma=0) as serving:
            async with serving.service.open(generation_request(max_tokens=200, n=3)) as generation:
                await anext(generation.run())
                await wait_until(lambda: serving.loop.num_live == 0)
            await serving.wait_until_nothing_is_held()


class TestQueueTimeout:
    @pytest.fixture
    async def busy(self, models: Models) -> AsyncIterator[LocalServing]:
        """A server whose only slot is taken."""
        async with local_serving(models.target, max_running=1, queue_timeout_s=0.05) as serving:
            request = generation_request(max_tokens=200)
            serving.targets.delay_s = 0.2
            async with serving.service.open(request) as generation:
                deltas = generation.run()
                await anext(deltas)
                yield serving
                await deltas.aclose()
            serving.targets.delay_s = 0.0
            await serving.wait_until_nothing_is_held()

    async def test_a_whole_answer_is_503(self, busy: LocalServing) -> None:
        async with client_of(busy) as client:
            response = await client.post("/v1/completions", json=body())
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "queue_timeout"
        assert "queue_timeout_s" in response.json()["error"]["message"]
        assert response.headers["retry-after"] == "1"

    async def test_a_stream_ends_with_an_error_event(self, busy: LocalServing) -> None:
        async with client_of(busy) as client:
            events = await stream(client, n=2)
        assert events[-1]["error"]["code"] == "queue_timeout"


@pytest.mark.parametrize("max_running", [3, 16])
async def test_whoever_leaves_when_nothing_stays_held(max_running: int, models: Models) -> None:
    """In the queue, in the prefill, between rounds, while its reader is behind."""
    rng = random.Random(max_running)
    async with local_serving(models.target, max_running=max_running, keys=two_keys()) as serving:

        async def visit(number: int) -> None:
            request = generation_request(
                prompt="x" * rng.choice([1, 40, 100]), max_tokens=100, n=rng.choice([1, 1, 3])
            )
            async with serving.service.open(request, (ALICE, BOB)[number % 2]) as generation:
                async for _ in generation.run():
                    await asyncio.sleep(rng.choice([0, 0, 0.02]))

        visits = []
        for number in range(40):
            visits.append(asyncio.create_task(visit(number)))
            await asyncio.sleep(rng.uniform(0, 0.01))
            if rng.random() < 0.7:
                rng.choice(visits).cancel()
        for task in visits:
            task.cancel()
        results: list[Any] = await asyncio.gather(*visits, return_exceptions=True)
        for result in results:
            assert result is None or isinstance(result, asyncio.CancelledError | OverloadedError)
        await serving.wait_until_nothing_is_held()
        async with client_of(serving) as client:
            client.headers["Authorization"] = "Bearer alice"
            assert len((await complete(client))["choices"][0]["text"]) == 12
