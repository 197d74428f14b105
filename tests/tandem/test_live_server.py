"""The app that benches and loads start."""

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.live import server


def test_it_waits_for_the_forwards_of_what_is_deployed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An app without a draft model has no draft pool."""
    answers = [True, True, False]
    asked: list[str] = []

    def get_deployment_handle(name: str, app: str) -> Any:
        assert (name, app) == ("TargetGroup", "default"), "it is not deployed"

        def status() -> Any:
            asked.append(name)
            return SimpleNamespace(
                result=lambda: SimpleNamespace(is_compiling=answers[len(asked) - 1])
            )

        return SimpleNamespace(status=SimpleNamespace(remote=status))

    applications = {"default": SimpleNamespace(deployments={"Router": None, "TargetGroup": None})}
    fake = SimpleNamespace(
        status=lambda: SimpleNamespace(applications=applications),
        get_deployment_handle=get_deployment_handle,
    )
    monkeypatch.setattr(server, "serve", fake)
    monkeypatch.setattr(server, "POLL_S", 0.0)
    server.wait_until_compiled()
    assert len(asked) == len(answers)
