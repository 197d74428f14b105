"""What is deployed for which options."""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from huggingface_hub import get_token

from deployments.args import AppArgs, HubToken
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


def deployments_of(app: Any) -> Iterator[Any]:
    deployment = app._bound_deployment
    yield deployment
    for part in deployment.init_args:
        if hasattr(part, "_bound_deployment"):
            yield from deployments_of(part)


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
