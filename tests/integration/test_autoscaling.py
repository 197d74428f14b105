"""A worker that Serve scales: more replicas while many sequences run, each of them at work."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster import bundled
from cluster.replica_range import ReplicaRange
from deployments import autoscaling
from tests.integration.conftest import Deploy, Served, served_tokens
from workers.model import load_config

IMPATIENT = {
    "metrics_interval_s": 0.3,
    "look_back_period_s": 1.0,
    "upscale_delay_s": 0.0,
    "downscale_delay_s": 8.0,  # longer than the load ever pauses
    "target_ongoing_requests": 4,
}
"""Serve's defaults would have a test wait for a minute."""
OPTIONS = {"num_target_groups": "1:2", "num_draft_replicas": "1:2", "compile": "off"}


@pytest.fixture
def random_draft(tmp_path: Path) -> str:
    """A drafter of the bundled one's shape, which is wrong nearly always."""
    torch.manual_seed(0)
    config = load_config(bundled.resolve(bundled.DRAFT_NAME))
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    scaling_options = autoscaling.scaling_options

    def impatient(replicas: ReplicaRange) -> dict[str, Any]:
        options = scaling_options(replicas)
        if "autoscaling_config" in options:
            options["autoscaling_config"] |= IMPATIENT
        return options

    monkeypatch.setattr("deployments.builder.scaling_options", impatient)


async def replicas(served: Served, deployment: str) -> dict[str, int]:
    """Steps made so far, by replica."""
    statuses = await served.handle(deployment).broadcast("status").results_async(timeout_s=30)
    return {status.replica_id: status.num_steps for status in statuses}


@pytest.mark.usefixtures("_soon")
@pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning")
async def test_replicas_come_with_the_load_work_and_go_with_it(
    deploy: Deploy, random_draft: str, prompts: list[str], sampled_tokens: list[list[int]]
) -> None:
    """However many there are, and however far a draft model that knows nothing drafts."""
    served = deploy(draft=random_draft, **OPTIONS)
    await served.set_gamma(4)
    both = ("TargetGroup", "DraftPool")
    assert [len(await replicas(served, name)) for name in both] == [1, 1]

    async def generate(num_prompts: int = 16, concurrency: int = 16) -> None:
        tokens = await served_tokens(served, prompts[:num_prompts], concurrency=concurrency)
        assert tokens == sampled_tokens[:num_prompts]

    async def until_all_work(num_replicas: int) -> None:
        while True:
            await generate()
            steps = [await replicas(served, name) for name in both]
            if all(len(made) == num_replicas and all(made.values()) for made in steps):
                return

    async with asyncio.timeout(180):
        await until_all_work(2)
    await served.set_gamma(8)
    await generate()
    async with asyncio.timeout(90):
        while [len(await replicas(served, name)) for name in both] != [1, 1]:
            await asyncio.sleep(0.5)
    await generate(num_prompts=4, concurrency=1)  # so few that no replica comes again
