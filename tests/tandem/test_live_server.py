"""The app that benches and loads start."""

import os
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


def test_handles_end_before_ray_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else their threads would call a Ray that is gone, also where the block has failed."""
    calls: list[str] = []
    handle = SimpleNamespace(shutdown=lambda: calls.append("handle ends"))
    client = SimpleNamespace(handle_cache={"key": handle})
    fake_ray = SimpleNamespace(
        init=lambda **_: calls.append("joined"),
        is_initialized=lambda: True,
        shutdown=lambda: calls.append("left"),
    )
    monkeypatch.setattr(server, "ray", fake_ray)
    monkeypatch.setattr(server, "maybe_enable_token_auth_if_token_available", lambda **_: None)
    monkeypatch.setattr(server, "_get_global_client", lambda **_: client)
    with pytest.raises(RuntimeError, match="fails"), server.joined_ray(os.getpid()):
        raise RuntimeError("it fails")
    assert calls == ["joined", "handle ends", "left"]
