"""Cases in batches, without drafts and with, and what must hold for each of them."""

import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.fuzz.cases import Body, draw_case, innocent_case
from tandem.fuzz.outcome import Outcome
from tandem.fuzz.rig import MODEL_NAME, Rig, Subject, open_rig
from tandem.live.client import cancel_all

logger = logging.getLogger(__name__)

BATCH_SIZE = 8
NUM_INNOCENT = 2
NUM_LEAVING = 2
GAMMAS = (1, 5, "dynamic")
BATCH_TIMEOUT_S = 120.0
MAX_FINDINGS = 20
"""The number of findings after which a run ends: more of them say little more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that must not be."""

    reason: str
    cases: tuple[Body, ...]
    """Requests that bring the fault about: one where one is enough, none if it needs no case."""
    gamma: int | str

    def __str__(self) -> str:
        cases = "\n".join(json.dumps(case) for case in self.cases)
        return f"{self.reason} (gamma={self.gamma})\n{cases}"


@dataclass(slots=True, kw_only=True)
class FuzzReport:
    num_cases: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    """The number of requests that ended with each HTTP status, innocent ones left out."""
    num_accepted: int = 0
    """Drafts that stand in texts: without any the drafts would have been of no use."""
    findings: list[Finding] = field(default_factory=list)


async def run_fuzz(subject: Subject, *, num_cases: int, seed: int) -> FuzzReport:
    """Draw cases and try them; the same seed draws the same."""
    rng = random.Random(seed)
    report = FuzzReport()
    vocab_size = subject.target.vocab_size
    innocent = await _reference(subject)
    while report.num_cases < num_cases and len(report.findings) < MAX_FINDINGS:
        async with open_rig(subject) as rig:
            while report.num_cases < num_cases and len(report.findings) < MAX_FINDINGS:
                size = min(BATCH_SIZE, num_cases - report.num_cases)
                cases = tuple(
                    draw_case(rng, model=MODEL_NAME, vocab_size=vocab_size) for _ in range(size)
                )
                report.num_cases += size
                gamma = GAMMAS[report.num_cases // BATCH_SIZE % len(GAMMAS)]
                reason = await _try_batch(rig, cases, gamma, innocent, report)
                if reason is not None:
                    report.findings += await _blame(subject, cases, gamma, innocent, reason)
                    break  # what has failed may be broken: the next are tried on a new one
    return report


async def replay(subject: Subject, cases: Sequence[Body], gamma: int | str) -> str | None:
    """Try given cases together on an app of their own; a sentence if they fail."""
    innocent = await _reference(subject)
    async with open_rig(subject) as rig:
        return await _try_batch(rig, cases, gamma, innocent, FuzzReport())


async def _reference(subject: Subject) -> tuple[Outcome, ...]:
    """The texts of the innocent, alone and without drafts."""
    async with open_rig(subject) as rig:
        return tuple([await rig.ask(case) for case in _innocent_cases()])


async def _blame(
    subject: Subject,
    cases: Sequence[Body],
    gamma: int | str,
    innocent: tuple[Outcome, ...],
    reason: str,
) -> list[Finding]:
    """A finding for each case of a batch that fails alone, or one for all if none does.

    None is to blame for what happens without any.
    """
    findings: list[Finding] = []
    for suspects in ((), *((case,) for case in cases)):
        async with open_rig(subject) as rig:
            alone = await _try_batch(rig, suspects, gamma, innocent, FuzzReport())
        if alone is not None:
            findings.append(Finding(reason=alone, cases=suspects, gamma=gamma))
        if findings and not suspects:
            break
    findings = findings or [Finding(reason=reason, cases=tuple(cases), gamma=gamma)]
    for finding in findings:
        logger.warning("%s", finding)
    return findings


async def _try_batch(
    rig: Rig,
    cases: Sequence[Body],
    gamma: int | str,
    innocent: tuple[Outcome, ...],
    report: FuzzReport,
) -> str | None:
    """A sentence about why a batch fails; None if it does not."""
    outcomes: list[list[Outcome]] = []
    for tried_gamma in (0, gamma):
        rig.use_gamma(tried_gamma)
        asked = [*cases, *_innocent_cases()]
        leaving = [asyncio.create_task(rig.ask(case)) for case in _leaving_cases()]
        try:
            async with asyncio.timeout(BATCH_TIMEOUT_S):
                answers = await asyncio.gather(*[rig.ask(case) for case in asked])
        except TimeoutError:
            return f"no answer within {BATCH_TIMEOUT_S:.0f} s"
        finally:
            await cancel_all(leaving)
        outcomes.append(answers)
        if (held := await rig.what_is_held()) is not None:
            return f"afterwards: {held}"
        if complaints := rig.take_complaints():
            return f"the log says: {complaints[0]}"
    plain, drafted = outcomes
    report.statuses.update(outcome.status for outcome in drafted[: len(cases)])
    report.num_accepted += sum(outcome.num_accepted for outcome in drafted)
    for case, without, with_drafts in zip(cases, plain, drafted, strict=False):
        if (reason := _fault(case, without, with_drafts)) is not None:
            return reason
    for answers in outcomes:
        if tuple(answer.without_chance for answer in answers[len(cases) :]) != innocent:
            return f"an innocent request had {answers[len(cases) :]}, not {innocent}"
    return None


def _innocent_cases() -> list[Body]:
    return [innocent_case(MODEL_NAME, index) for index in range(NUM_INNOCENT)]


def _leaving_cases() -> list[Body]:
    """Long requests, whose clients hang up when the others are answered."""
    return [
        {**innocent_case(MODEL_NAME, NUM_INNOCENT + index), "max_tokens": 100, "stream": True}
        for index in range(NUM_LEAVING)
    ]


def _has_one_text(case: Body) -> bool:
    """Whether a request's text is that of its seed, whatever is drafted."""
    rule = (case.get("speculation") or {}).get("verification", "coupled")
    return rule == "coupled" or case.get("temperature") == 0


def _max_tokens(case: Body) -> int:
    """Tokens of all completions together at most."""
    prompts = case.get("prompt", "")  # a chat has one
    num_prompts = 1 if isinstance(prompts, str) or isinstance(prompts[0], int) else len(prompts)
    of_each = case["max_completion_tokens" if "max_tokens" not in case else "max_tokens"]
    num_choices: int = case.get("best_of") or case.get("n", 1)
    return num_prompts * num_choices * int(of_each)


def _fault(case: Body, plain: Outcome, drafted: Outcome) -> str | None:
    for outcome in (plain, drafted):
        if outcome.status != 200 and not outcome.is_refused:
            return f"a legal request ends with status {outcome.status}: {outcome.error[:300]}"
        if any(reason is None for _, reason in outcome.texts):
            return f"a choice has no end: {outcome}"
        _, num_tokens = outcome.usage
        if num_tokens > _max_tokens(case):
            return f"{num_tokens} tokens, more than were asked for"
        if outcome.num_accepted > num_tokens and not case.get("stream"):
            return f"{outcome.num_accepted} drafts accepted in a text of {num_tokens} tokens"
    if _has_one_text(case) and plain.without_chance != drafted.without_chance:
        return f"without drafts {plain}, with drafts {drafted}"
    return None
