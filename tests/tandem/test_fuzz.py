"""The fuzz of sampling parameters on tiny models, and that it finds what it is there for."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from deployments.api.chat import ChatCompletionRequest
from deployments.api.completions import CompletionRequest
from deployments.router.tokenizer import load_tokenizer
from tandem.fuzz.cases import FLOATS, Body, draw_case
from tandem.fuzz.rig import MODEL_NAME, Subject
from tandem.fuzz.run import FuzzReport, replay, run_fuzz
from tests.deployments.router.chat.templates import THINKING
from tests.grammars import VOCAB_SIZE, save_grammar_model
from workers import ratio_test, verification
from workers.model import load_model
from workers.sampling import SamplingRow
from workers.step_worker import StepWorker
from workers.verification import Verdict


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A target and itself, slightly off: a draft that is often right."""
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("fuzzed")
    name = save_grammar_model(folder)
    target, draft = (load_model(name, dtype="float32", device="cpu") for _ in range(2))
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in draft.module.parameters():
            parameter += torch.randn_like(parameter) * 0.02
    tokenizer = load_tokenizer(name)
    tokenizer.chat_template = THINKING  # type: ignore[misc]
    return Subject(target=target, draft=draft, tokenizer=tokenizer)


def describe(report: FuzzReport) -> str:
    return "\n".join(map(str, report.findings))


async def test_48_cases_are_exact_and_harm_nobody(subject: Subject) -> None:
    """Two batches for each gamma; `make fuzz` tries thousands of cases."""
    report = await run_fuzz(subject, num_cases=48, seed=0)
    assert report.findings == [], describe(report)
    assert report.num_cases == 48
    assert report.statuses[200] > 31
    assert report.num_accepted > 48


def test_cases_are_drawn_alike_and_reach_the_edges_of_the_schema() -> None:
    def draw() -> list[dict[str, object]]:
        rng = random.Random(3)
        return [draw_case(rng, model="m", vocab_size=VOCAB_SIZE) for _ in range(2000)]

    cases = draw()
    assert cases == draw()
    assert json.loads(json.dumps(cases)) == cases
    for case in cases:
        request = ChatCompletionRequest if "messages" in case else CompletionRequest
        request.model_validate(case)
    told = {name for case in cases for name in case}
    assert told >= {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields}
    for name in FLOATS:
        limits = [
            value
            for limit in CompletionRequest.model_fields[name].metadata
            for value in (getattr(limit, "ge", None), getattr(limit, "le", None))
            if value is not None
        ]
        assert limits
        assert {*limits} <= {case.get(name) for case in cases}, name
    assert {2**63 - 1, -(2**63), 0} <= {case["seed"] for case in cases}
    biases = [case.get("logit_bias") or {} for case in cases]
    assert {len(bias) for bias in biases} >= {1, 5, VOCAB_SIZE - 1, VOCAB_SIZE}


def accept_all(draft_tokens: Sequence[int], target_tokens: Sequence[int]) -> Verdict:
    tokens = (*draft_tokens, target_tokens[-1])
    return Verdict(tokens=tokens, num_accepted=len(draft_tokens), num_tested=len(draft_tokens))


async def test_texts_that_depend_on_drafts_are_found(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them here, the innocent ones too: no case is to blame."""
    with monkeypatch.context() as broken:
        broken.setattr(verification, "accept_matching", accept_all)
        (finding,) = (await run_fuzz(subject, num_cases=1, seed=1)).findings
        assert "an innocent request had" in finding.reason
        assert finding.cases == ()
        assert await replay(subject, [], finding.gamma) is not None
    assert await replay(subject, [], finding.gamma) is None


async def test_what_is_not_released_is_found(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepWorker, "release", lambda *_: [])
    monkeypatch.setattr("tandem.fuzz.rig.REST_TIMEOUT_S", 0.1)
    report = await run_fuzz(subject, num_cases=1, seed=1)
    assert "afterwards: " in report.findings[0].reason
    assert "sequences of the target" in report.findings[0].reason


MAY_BE_REFUSED = {
    "messages", "min_tokens", "response_format", "structured_outputs",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar",
}  # fmt: skip


NUM_SUSPECTS = 4


def case_of_its_own() -> tuple[int, Body]:
    """A case whose sampling seed no other of its batch has, and the fuzz's seed that draws it."""
    for seed in range(100):
        rng = random.Random(seed)
        cases = [
            draw_case(rng, model=MODEL_NAME, vocab_size=VOCAB_SIZE) for _ in range(NUM_SUSPECTS)
        ]
        seeds = [case["seed"] for case in cases]
        for case in cases:
            is_answered = not case.keys() & MAY_BE_REFUSED
            if is_answered and 1000 < case["seed"] < 2**62 and seeds.count(case["seed"]) == 1:
                return seed, case
    raise AssertionError("none was drawn")


async def test_a_request_that_fails_is_found_and_blamed_alone(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed, guilty = case_of_its_own()
    sample: Callable[..., list[int]] = verification.sample

    def fail(logits: torch.Tensor, rows: Sequence[SamplingRow], *more: object) -> list[int]:
        if any(row.seed == guilty["seed"] for row in rows):
            raise RuntimeError("cannot sample")
        return sample(logits, rows, *more)

    with monkeypatch.context() as broken:
        for rules in (verification, ratio_test):
            broken.setattr(rules, "sample", fail)
        report = await run_fuzz(subject, num_cases=NUM_SUSPECTS, seed=seed)
        assert [finding.cases for finding in report.findings] == [(guilty,)]
        assert json.dumps(guilty) in str(report.findings[0])
        assert await replay(subject, [guilty], 5) is not None
    assert await replay(subject, [guilty], 5) is None
