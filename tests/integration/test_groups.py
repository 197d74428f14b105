"""Targets of several ranks, several of them, and several routers: the same texts."""

import random
from collections import Counter
from functools import partial
from typing import Any

import pytest

from cluster.bench.client import Endpoint, Load
from cluster.chaos.run import ChaosOptions, run_chaos
from cluster.chaos.victims import Victim, Victims
from tests.integration.conftest import (
    APP,
    MODEL,
    NUM_TOKENS,
    Deploy,
    Served,
    served_texts,
    served_tokens,
)

TWO_RANKS = {"tensor_parallel_size": 2}
ALL_TWICE = {
    **TWO_RANKS,
    "num_target_groups": 2,
    "num_router_replicas": 2,
    "recovery_timeout_s": 300,
}


@pytest.mark.parametrize("options", [TWO_RANKS, ALL_TWICE], ids=["one group", "all twice"])
async def test_texts_are_those_of_one_rank(
    options: dict[str, Any],
    deploy: Deploy,
    prompts: list[str],
    greedy_texts: list[str],
    sampled_tokens: list[list[int]],
) -> None:
    served = deploy(**options)
    assert await served_texts(served, prompts[:16], concurrency=16) == greedy_texts[:16]
    assert await served_tokens(served, prompts[:16], concurrency=16) == sampled_tokens[:16]
    assert len(await num_steps_by_group(served)) == options.get("num_target_groups", 1)


async def num_steps_by_group(served: Served) -> dict[str, int]:
    """Of the groups that have done some."""
    target_group = served.handle("TargetGroup")
    statuses = [await target_group.status.remote() for _ in range(20)]  # each from any
    return {status.replica_id: status.num_steps for status in statuses if status.num_steps}


async def test_killed_processes_change_no_text(deploy: Deploy, prompts: list[str]) -> None:
    """`python -m cluster chaos`, in short."""
    served = deploy(**ALL_TWICE)
    report = await run_chaos(
        Endpoint(url=served.url, model=MODEL, is_ours=True),
        Load(prompts=prompts[:12], max_tokens=NUM_TOKENS, temperature=0.8),
        partial(Victims(APP).kill, rng=random.Random(0)),
        ChaosOptions(num_requests=24, num_kills=4, mean_pause_s=2, concurrency=8),
    )
    assert (report.lost, report.wrong) == ([], [])
    assert report.kills == Counter(dict.fromkeys(Victim, 1))
