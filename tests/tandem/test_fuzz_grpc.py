"""The fuzz of gRPC messages on the bundled pair, and that it finds what it is there for."""

import random
from typing import Any

import pytest
import torch

from cluster import bundled
from deployments.api import tandem_pb2
from deployments.api.grpc import Rpcs
from deployments.router.request import SOMEBODY
from deployments.router.tokenizer import load_tokenizer
from tandem.fuzz.grpc_run import GrpcReport, run_grpc_fuzz
from tandem.fuzz.keys import WITH_KEY, WITHOUT_KEY
from tandem.fuzz.messages import METHODS, draw_call, read_call
from tandem.fuzz.rig import Subject
from workers.model import load_model
from workers.step_worker import StepWorker


@pytest.fixture(scope="module")
def subject() -> Subject:
    torch.set_num_threads(1)
    target, draft = map(bundled.resolve, (bundled.TARGET_NAME, bundled.DRAFT_NAME))
    return Subject(
        target=load_model(target, dtype="float32", device="cpu"),
        draft=load_model(draft, dtype="float32", device="cpu"),
        tokenizer=load_tokenizer(target),
    )


def describe(report: GrpcReport) -> str:
    return "\n".join(map(str, report.findings))


async def test_60_calls_end_with_codes_of_a_client_s_own_doing(subject: Subject) -> None:
    report = await run_grpc_fuzz(subject, num_calls=60, seed=0)
    assert report.findings == [], describe(report)
    assert report.num_calls == 60
    assert report.codes["OK"] > 15
    assert report.codes["INVALID_ARGUMENT"] > 5
    assert report.codes["UNAUTHENTICATED"] > 1
    assert report.codes["RESOURCE_EXHAUSTED"] > 0  # of the limited key


def test_calls_are_drawn_alike_and_reach_every_method() -> None:
    def draw() -> list[Any]:
        rng = random.Random(3)
        return [draw_call(rng, model="m", vocab_size=100) for _ in range(500)]

    calls = draw()
    assert calls == draw()
    assert [read_call(str(call)) for call in calls] == calls
    assert {call.method for call in calls} == set(METHODS)
    assert any(call.is_left for call in calls)
    assert any(call.timeout_s for call in calls)
    assert {call.authorization for call in calls} == {*WITH_KEY, *WITHOUT_KEY}
    readable = 0
    for call in calls:
        if call.method == "Generate":
            try:
                tandem_pb2.GenerateRequest.FromString(call.raw)
            except Exception:
                continue
            readable += 1
    assert 0 < readable < sum(call.method == "Generate" for call in calls)


async def test_a_method_that_fails_is_found(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Rpcs, "_check", fail)
    report = await run_grpc_fuzz(subject, num_calls=20, seed=0)
    assert "ends with INTERNAL: internal error" in report.findings[0].reason


async def test_a_stranger_who_is_answered_is_found(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rpcs, "_caller", lambda *_: SOMEBODY)
    report = await run_grpc_fuzz(subject, num_calls=60, seed=0)
    assert "ends with OK" in report.findings[0].reason


async def test_what_is_not_released_is_found(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepWorker, "release", lambda *_: [])
    monkeypatch.setattr("tandem.fuzz.rig.REST_TIMEOUT_S", 0.1)
    report = await run_grpc_fuzz(subject, num_calls=20, seed=0)
    assert "afterwards: " in report.findings[0].reason
