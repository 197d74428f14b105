"""What is deployed for which options."""

from typing import Any

import pytest

from deployments.args import AppArgs
from deployments.builder import build


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
