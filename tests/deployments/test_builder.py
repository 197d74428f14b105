"""What is deployed for which options."""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from huggingface_hub import get_token

from cluster.placement import LEAST_CPUS
from deployments.args import AppArgs, HubToken
from deployments.builder import build
from deployments.replicas.target_model import target_cache


def deployed(app: Any) -> set[str]:
    """Names of the deployments that an application is made of."""
    deployment = app._bound_deployment
    parts = [part for part in deployment.init_args if hasattr(part, "_bound_deployment")]
    return {deployment.name}.union(*map(deployed, parts))


@pytest.mark.parametrize(
    ("drafter", "has_pool"),
    [("model", True), ("prompt_lookup,model", True), ("suffix", False), ("none", False)],
)
def test_a_draft_pool_is_deployed_for_a_draft_model_only(drafter: str, has_pool: bool) -> None:
    expected = {"Router", "TargetGroup", "DraftPool"} if has_pool else {"Router", "TargetGroup"}
    assert deployed(build(AppArgs(drafter=drafter, device="cpu"))) == expected


def deployments_of(app: Any) -> Iterator[Any]:
    deployment = app._bound_deployment
    yield deployment
    for part in deployment.init_args:
        if hasattr(part, "_bound_deployment"):
            yield from deployments_of(part)


@pytest.mark.parametrize(
    ("options", "target", "draft"),
    [
        ({}, 1, 1),
        ({"draft_gpu_share": 0.1}, 0.9, 0.1),
        ({"draft_gpu_share": 0.3, "tensor_parallel_size": 2}, 0.7, 0.3),
        ({"drafter": "suffix"}, 1, None),
        ({"drafter": "suffix", "tensor_parallel_size": 2}, 1, None),
    ],
)
def test_a_draft_may_share_a_gpu_with_a_rank_of_the_target(
    options: dict[str, Any], target: float, draft: float | None
) -> None:
    """The ranks of a group take their parts from bundles, which the deployment asks for."""
    args = AppArgs(device="cuda", **options)
    found = {deployment.name: deployment for deployment in deployments_of(build(args))}
    assert found["TargetGroup"].ray_actor_options["num_gpus"] == target
    bundles = found["TargetGroup"]._replica_config.placement_group_bundles
    num_bundles = args.tensor_parallel_size if args.tensor_parallel_size > 1 else 0
    assert (bundles or []) == [{"CPU": LEAST_CPUS, "GPU": target}] * num_bundles
    assert ("DraftPool" in found) == (draft is not None)
    if draft is not None:
        assert found["DraftPool"].ray_actor_options["num_gpus"] == draft
        assert target_cache(args).gpu_share == target


def test_all_replicas_are_given_the_token_which_nothing_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    deployments = list(deployments_of(build(AppArgs(device="cpu"))))
    assert len(deployments) == 3
    for deployment in deployments:
        (token,) = [part for part in deployment.init_args if isinstance(part, HubToken)]
        assert pickle.loads(pickle.dumps(token)).value == "hf_secret"
        shown = f"{token} {token!r} {deployment.init_args!r} {deployment.ray_actor_options!r}"
        assert "hf_secret" not in shown


def test_a_process_asks_with_the_token_it_is_given_and_so_do_those_that_it_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_node")
    HubToken(value=None).use()
    assert get_token() == "hf_of_the_node"
    HubToken(value="hf_given").use()
    assert get_token() == "hf_given"
    code = "import os; print(os.environ['HF_TOKEN'])"
    started = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert started.stdout.split() == [b"hf_given"]
