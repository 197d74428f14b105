"""Drafters that raise or lie: the text is that of the target alone."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from deployments.router.drafting.lookup import PromptLookup
from deployments.router.drafting.protocol import DraftRequest, Offer, Proposed
from deployments.router.sequence import GenerationParams
from deployments.router.sequence import Sequence as LiveSequence
from tests.deployments.loops import Models, make_params, run_all, running_loop, wait_until
from tests.fakes import RecordingObserver
from workers.types import DraftTokens


class Raising(PromptLookup):
    """Raises about one sequence, wherever it is asked to."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.num_raised = 0
        self._method = method

    def _raise(self, method: str, sequence: LiveSequence) -> None:
        if method == self._method and sequence.seq_id == "s1":
            self.num_raised += 1
            raise KeyError("no such thing")

    def draft(self, sequence: LiveSequence, max_tokens: int) -> DraftTokens:
        self._raise("draft", sequence)
        return super().draft(sequence, max_tokens)

    def forget(self, sequence: LiveSequence) -> None:
        self._raise("forget", sequence)
        super().forget(sequence)


class Lying(PromptLookup):
    def __init__(self, lie: DraftTokens) -> None:
        super().__init__()
        self._lie = lie

    def draft(self, sequence: LiveSequence, max_tokens: int) -> DraftTokens:  # noqa: ARG002
        return self._lie


class Careless:
    """A remote drafter that raises wherever it is asked to."""

    source = "careless"

    def __init__(self, method: str) -> None:
        self._method = method

    def _raise(self, method: str) -> None:
        if method == self._method:
            raise ZeroDivisionError(method)

    def offer(self, sequence: LiveSequence, max_tokens: int) -> Offer | None:
        self._raise("offer")
        return Offer(max_tokens=max_tokens, is_ready=len(sequence.tokens) % 5 > 0)

    def catch_up(self, sequence: LiveSequence) -> None:  # noqa: ARG002
        self._raise("catch_up")

    async def propose(self, requests: list[DraftRequest]) -> Proposed:
        self._raise("propose")
        return Proposed(drafts={r.sequence.seq_id: DraftTokens(tokens=(5,)) for r in requests})

    def forget(self, sequence: LiveSequence) -> None:  # noqa: ARG002
        self._raise("forget")

    async def close(self) -> None: ...


LIES = {
    "too many": DraftTokens(tokens=(5,) * 200),
    "no tokens of ours": DraftTokens(tokens=(-7, 10**9), confidences=(0.5, 0.5)),
    "no confidences": DraftTokens(tokens=(5, 6), confidences=(float("nan"), 2.0)),
    "too many confidences": DraftTokens(tokens=(5,), confidences=(0.5,) * 3),
    "another's name": DraftTokens(tokens=(5,), source="somebody"),
}


def all_params() -> list[GenerationParams]:
    """Prompts that repeat themselves."""
    return [replace(make_params(seed), prompt=make_params(seed).prompt * 3) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def expected(models: Models) -> list[list[int]]:
    """What is written without drafts."""

    async def run() -> list[list[int]]:
        async with running_loop(models, gamma=0) as (loop, _, _):
            return [stream.token_ids for stream in await run_all(loop, all_params(), concurrency=3)]

    return asyncio.run(run())


class TestFaults:
    async def check_exact(
        self, models: Models, expected: list[list[int]], **options: Any
    ) -> RecordingObserver:
        async with running_loop(models, **options) as (loop, targets, observer):
            streams = await run_all(loop, all_params(), concurrency=3)
            assert [stream.token_ids for stream in streams] == expected
            await wait_until(lambda: loop.num_live == 0 and targets.num_used_blocks == 0)
        return observer

    @pytest.mark.parametrize("method", ["draft", "forget"])
    async def test_a_local_drafter_that_raises_is_silent_for_that_sequence(
        self,
        method: str,
        models: Models,
        expected: list[list[int]],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        drafter, after = Raising(method), PromptLookup()
        after.source = "after"
        observer = await self.check_exact(models, expected, drafters=[drafter, after])
        assert drafter.num_raised == 1
        assert "no such thing" in caplog.text
        drafted = {o.seq_id: o.source for record in observer.records for o in record.outcomes}
        assert drafted["s1"] == ("after" if method == "draft" else "prompt_lookup")
        assert drafted["s2"] == "prompt_lookup"

    @pytest.mark.parametrize("lie", LIES)
    async def test_a_local_drafter_that_lies_changes_nothing(
        self, lie: str, models: Models, expected: list[list[int]]
    ) -> None:
        observer = await self.check_exact(models, expected, drafters=[Lying(LIES[lie])])
        outcomes = [outcome for record in observer.records for outcome in record.outcomes]
        assert {outcome.source for outcome in outcomes} <= {"prompt_lookup"}
        assert max((o.num_draft_tokens for o in outcomes), default=0) <= 4

    @pytest.mark.parametrize("overlap", [False, True])
    @pytest.mark.parametrize("method", ["offer", "catch_up", "propose", "forget"])
    async def test_a_remote_drafter_that_raises_changes_nothing(
        self,
        method: str,
        overlap: bool,
        models: Models,
        expected: list[list[int]],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        await self.check_exact(models, expected, drafters=[Careless(method)], overlap=overlap)
        assert "ZeroDivisionError" in caplog.text
