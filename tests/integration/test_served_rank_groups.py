"""Targets of several ranks, as many as the load asks for, and several routers: the same texts.

The app takes the place of the other one. By its name it runs last of those that use one: it starts
more processes than any other, which would compete with the tests of the other pytest process.
"""

import asyncio
from collections import Counter
from typing import Any

import pytest
from ray import serve

from cluster.replica_range import ReplicaRange
from deployments import AppArgs, autoscaling, build
from deployments.replicas.worker_replica import WorkerStatus
from tandem.chaos.events import Blow, Event, Victim
from tandem.chaos.run import ChaosOptions, run_chaos
from tandem.chaos.victims import Victims
from tandem.live.client import Endpoint, Load
from tests.integration.conftest import (
    APP,
    MODEL,
    NUM_TOKENS,
    OPTIONS,
    Served,
    served_texts,
    served_tokens,
)
from tests.integration.mixed import DRAFTERS, check_that_drafts_change_nothing
from workers.cache_size import GIB

CACHE_LEN = 336
"""Tokens that fit in a group's cache: the longest of the prompts' sequences, and a few more."""
TOKEN_BYTES = 2048
"""The bytes of a token in a rank's share of the bundled target's cache, in fp32."""
UP_TO_TWO: dict[str, Any] = {
    **OPTIONS,
    **DRAFTERS,
    "tensor_parallel_size": 2,
    "num_target_groups": "1:2",
    "num_router_replicas": 2,
    "compile": "off",  # it would compete with all of them
    "max_model_len": CACHE_LEN,
    "kv_cache_gib": CACHE_LEN * TOKEN_BYTES / GIB,
    "recovery_timeout_s": 300,
}
GAMMA = 3
VICTIMS = (Victim.DRAFT, Victim.RANK_0, Victim.OTHER_RANK)
"""What is killed. All ranks together would be started like these; other tests use the proxy."""
IMPATIENT = {
    "metrics_interval_s": 0.5,
    "look_back_period_s": 1.0,
    "upscale_delay_s": 0.0,
    "downscale_delay_s": 10.0,  # longer than the load ever pauses
    "target_ongoing_requests": 1,
}
"""Serve's defaults would have a test wait for a minute."""


def impatient_options(replicas: ReplicaRange) -> dict[str, Any]:
    options = autoscaling.scaling_options(replicas)
    if "autoscaling_config" in options:
        options["autoscaling_config"] |= IMPATIENT
    return options


@pytest.fixture(scope="module")
def served(served: Served) -> Served:
    args = AppArgs(http_port=served.http_port, grpc_port=served.grpc_port, **UP_TO_TWO)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deployments.builder.scaling_options", impatient_options)
        application = build(args)
    serve.delete(APP)
    serve.run(application, name=APP)
    return served


async def statuses(served: Served) -> list[WorkerStatus]:
    """The statuses of all target groups."""
    return list(await served.handle("TargetGroup").broadcast("status").results_async(timeout_s=60))


async def draft_always(served: Served) -> None:
    """Have both routers draft."""
    await asyncio.gather(*[served.set_gamma(GAMMA) for _ in range(20)])  # each of any router


@pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning")
async def test_replicas_come_with_the_load_and_write_what_one_rank_does(
    served: Served, prompts: list[str], greedy_texts: list[str], sampled_tokens: list[list[int]]
) -> None:
    """Eight streams, of which a group's blocks hold two."""
    await draft_always(served)
    assert len(await statuses(served)) == 1
    assert await served_texts(served, prompts[:2], concurrency=2) == greedy_texts[:2]

    async def write(num_prompts: int, num_tokens: int) -> None:
        # by the drafters, though these texts have been written before
        tokens = await served_tokens(
            served,
            prompts[:num_prompts],
            concurrency=num_prompts,
            mode="model",
            num_tokens=num_tokens,
        )
        assert tokens == [text[:num_tokens] for text in sampled_tokens[:num_prompts]]

    async with asyncio.timeout(300):
        while len(await statuses(served)) < 2:
            await write(2, 16)
            await asyncio.sleep(4)  # new ones start meanwhile
        await write(8, NUM_TOKENS)
        while not all(group.num_steps for group in await statuses(served)):
            await write(8, NUM_TOKENS)
    assert any(group.num_preemptions for group in await statuses(served))


async def test_every_way_to_draft_in_one_batch_changes_nothing(
    served: Served, prompts: list[str]
) -> None:
    await draft_always(served)
    await check_that_drafts_change_nothing(served, prompts)


async def test_killed_processes_change_no_text(served: Served, prompts: list[str]) -> None:
    """`tandem chaos`, in short."""
    kinds = tuple(Event(blow=Blow.KILL, victim=victim) for victim in VICTIMS)
    report = await run_chaos(
        Endpoint(url=served.url, model=MODEL),
        Load(prompts=prompts[:4], max_tokens=NUM_TOKENS, temperature=0.8),
        Victims(APP),
        ChaosOptions(
            num_requests=8, num_events=len(kinds), mean_pause_s=1, concurrency=2, kinds=kinds
        ),
    )
    assert (report.lost, report.wrong, report.held) == ([], [], 0)
    assert report.events == Counter(dict.fromkeys(kinds, 1))


async def test_replicas_go_with_the_load(served: Served) -> None:
    async with asyncio.timeout(180):
        while len(await statuses(served)) > 1:
            await asyncio.sleep(0.5)
