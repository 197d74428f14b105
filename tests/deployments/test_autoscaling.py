"""How many replicas of a worker are wanted, by what those that run report."""

from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig, AutoscalingContext
from ray.serve.deployment import Deployment

from cluster.replica_range import ReplicaRange
from deployments.args import AppArgs
from deployments.autoscaling import (
    NUM_SEQUENCES,
    SEQUENCES_PER_REPLICA,
    scaling_options,
    wanted_replicas,
)
from deployments.builder import build

ONE_TO_FOUR = ReplicaRange(minimum=1, maximum=4)


def context(metrics: dict[str, dict[Any, float]] | None, *, target: int = 2) -> AutoscalingContext:
    config = AutoscalingConfig(**scaling_options(ONE_TO_FOUR)["autoscaling_config"])
    names: dict[str, Any] = dict.fromkeys(AutoscalingContext.__init__.__annotations__)
    return AutoscalingContext(
        **names
        | {
            "target_num_replicas": target,
            "aggregated_metrics": metrics,
            "config": config,
        }
    )


@pytest.mark.parametrize(
    ("held", "wanted"),
    [([0], 0.0), ([8], 0.5), ([16], 1.0), ([20, 20], 2.5), ([64, 0], 4.0)],
)
def test_replicas_are_wanted_for_the_sequences_that_are_held(
    held: list[float], wanted: float
) -> None:
    assert SEQUENCES_PER_REPLICA == 16
    reported = {f"replica-{index}": number for index, number in enumerate(held)}
    assert wanted_replicas(context({NUM_SEQUENCES: reported})) == (wanted, {})


@pytest.mark.parametrize("metrics", [None, {}, {"ongoing_requests": {"a": 9.0}}])
def test_nothing_changes_until_a_replica_has_reported(metrics: Any) -> None:
    assert wanted_replicas(context(metrics, target=3)) == (3, {})


def test_serves_controller_can_call_it_without_this_package() -> None:
    """Serve's controller gets the function as bytes."""
    config = AutoscalingConfig(**scaling_options(ONE_TO_FOUR)["autoscaling_config"])
    assert (config.min_replicas, config.max_replicas) == (1, 4)
    policy: Any = config.policy.get_policy()
    assert policy is not wanted_replicas
    assert policy(context({NUM_SEQUENCES: {"a": 40.0}})) == (2.5, {})


def deployments_of(app: Any) -> dict[str, Deployment]:
    deployment = app._bound_deployment
    found = {deployment.name: deployment}
    for part in deployment.init_args:
        if hasattr(part, "_bound_deployment"):
            found |= deployments_of(part)
    return found


def test_workers_scale_by_it_and_routers_by_serves_own() -> None:
    args = AppArgs.model_validate(
        {
            "device": "cpu",
            "num_target_groups": "1:2",
            "num_draft_replicas": "2",
            "num_router_replicas": "1:3",
        }
    )
    deployments = deployments_of(build(args))
    scaled = {
        name: deployment._deployment_config.autoscaling_config
        for name, deployment in deployments.items()
    }
    assert scaled["DraftPool"] is None
    assert scaled["Router"].policy.is_default_policy_function()
    target = scaled["TargetGroup"]
    assert target.policy.policy_function == "deployments.autoscaling:wanted_replicas"
    assert (target.min_replicas, target.max_replicas) == (1, 2)
    assert target.get_target_ongoing_requests() == SEQUENCES_PER_REPLICA
