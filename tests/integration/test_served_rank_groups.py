"""Targets of several ranks, several of them, and several routers: the same texts.

By its name it runs last: it starts more processes than any other, which would compete with the
tests of the other pytest process.
"""

import asyncio
from collections import Counter

from deployments.replicas.worker_replica import WorkerStatus
from tandem.chaos.events import Blow, Victim, kinds_of_events
from tandem.chaos.run import ChaosOptions, run_chaos
from tandem.chaos.victims import Victims
from tandem.live.client import Endpoint, Load
from tests.integration.conftest import (
    APP,
    MODEL,
    NUM_TOKENS,
    Deploy,
    Served,
    served_texts,
    served_tokens,
)
from tests.integration.mixed import OPTIONS, check_that_drafts_change_nothing
from workers.cache_size import GIB

CACHE_LEN = 352
"""Tokens that fit in a group's cache: the longest of the prompts' sequences, and a few more."""
TOKEN_BYTES = 2048
"""The bytes of a token in a rank's share of the bundled target's cache, in fp32."""
ALL_TWICE = {
    **OPTIONS,
    "tensor_parallel_size": 2,
    "num_target_groups": 2,
    "num_router_replicas": 2,
    "num_draft_replicas": "2:3",
    "compile": "off",  # it would compete with all of them
    "max_model_len": CACHE_LEN,
    "kv_cache_gib": CACHE_LEN * TOKEN_BYTES / GIB,
    "recovery_timeout_s": 300,
}


async def test_texts_are_those_of_one_rank(
    deploy: Deploy,
    prompts: list[str],
    greedy_texts: list[str],
    sampled_tokens: list[list[int]],
) -> None:
    """Twelve streams, of which a group's blocks hold two."""
    served = deploy(**ALL_TWICE)
    assert await served_texts(served, prompts[:2], concurrency=2) == greedy_texts[:2]
    assert await served_tokens(served, prompts[:12], concurrency=12) == sampled_tokens[:12]
    groups, drafters = await statuses(served, "TargetGroup"), await statuses(served, "DraftPool")
    assert len(groups) == len(drafters) == 2
    assert all(group.num_steps for group in groups)
    assert any(group.num_preemptions for group in groups)
    assert all(drafter.num_steps for drafter in drafters)


async def test_every_way_to_draft_in_one_batch_changes_nothing(
    deploy: Deploy, prompts: list[str]
) -> None:
    served = deploy(**ALL_TWICE)
    await asyncio.gather(*[served.set_gamma(8) for _ in range(20)])  # each of any router
    await check_that_drafts_change_nothing(served, prompts)


async def statuses(served: Served, deployment: str) -> list[WorkerStatus]:
    """The statuses of all replicas of a deployment."""
    handle = served.handle(deployment)
    answers = [await handle.status.remote() for _ in range(20)]  # each from any
    return list({status.replica_id: status for status in answers}.values())


async def test_killed_processes_change_no_text(deploy: Deploy, prompts: list[str]) -> None:
    """`tandem chaos`, in short, and without the proxy, which other tests use too."""
    served = deploy(**ALL_TWICE)
    kills = kinds_of_events(num_ranks=2, blows=[Blow.KILL])
    kinds = tuple(kill for kill in kills if kill.victim is not Victim.PROXY)
    report = await run_chaos(
        Endpoint(url=served.url, model=MODEL),
        Load(prompts=prompts[:8], max_tokens=NUM_TOKENS, temperature=0.8),
        Victims(APP),
        ChaosOptions(
            num_requests=16, num_events=len(kinds), mean_pause_s=1, concurrency=8, kinds=kinds
        ),
    )
    assert (report.lost, report.wrong, report.held) == ([], [], 0)
    assert report.events == Counter(dict.fromkeys(kinds, 1))
