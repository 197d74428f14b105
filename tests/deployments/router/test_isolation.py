"""Nothing that one request carries reaches another through the round loop, whatever raises."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from deployments.router.policy.controller import DynamicGamma
from deployments.router.policy.gamma import (
    Candidate,
    Decision,
    Drafted,
    FixedGamma,
    ObservedRound,
    Outcome,
)
from tests.deployments.loops import (
    CACHE,
    Models,
    Stream,
    make_params,
    model_drafts,
    run_all,
    running_loop,
    wait_until,
)
from tests.fakes import LocalWorkers, ScriptedDrafter
from workers.drafters.model import ModelDrafter
from workers.errors import GenerationFailedError
from workers.sampling_params import SamplingParams
from workers.types import ProposeRequest, ProposeResult, Reply

UNSERVABLE = SamplingParams(logit_bias=((-1000, 1.0),))


class TestWorkerErrors:
    async def test_a_sequence_that_cannot_be_sampled_fails_alone(
        self, models: Models, plain: list[list[int]]
    ) -> None:
        expected = [plain[1], plain[3]]
        drafts = model_drafts(models)
        async with running_loop(models, drafts=drafts) as (loop, targets, observer):
            params = [make_params(1), make_params(2, sampling=UNSERVABLE), make_params(3)]
            first, failed, last = await run_all(loop, params, concurrency=3)
            assert isinstance(failed.error, GenerationFailedError)
            assert "internal error" in str(failed.error)
            assert [first.token_ids, last.token_ids] == expected
            await wait_until(lambda: targets.num_used_blocks + drafts.num_used_blocks == 0)
            assert (loop.num_live, observer.num_live) == (0, 0)

    async def test_a_sequence_that_drafters_cannot_serve_goes_on_without(
        self, models: Models, plain: list[list[int]]
    ) -> None:
        """It is asked for once, not again in every round, and others have their drafts."""
        expected = plain[1:3]
        asked: Counter[str] = Counter()

        class Choosy(ModelDrafter):
            def submit(self, request: ProposeRequest) -> list[ProposeResult]:
                asked[request.seq_id] += 1
                if request.seq_id == "s1":
                    request = replace(request, sampling=UNSERVABLE, k=max(1, request.k))
                return super().submit(request)

        drafts = LocalWorkers(lambda: Choosy(models.draft, CACHE))
        async with running_loop(models, drafts=drafts) as (loop, _, observer):
            params = [make_params(1), make_params(2)]
            streams = await run_all(loop, params, concurrency=2)
            assert [stream.token_ids for stream in streams] == expected
            assert asked["s1"] == 1
            assert asked["s2"] > 5
            drafted = {o.seq_id for record in observer.records for o in record.outcomes}
            assert drafted == {"s2"}

    async def test_a_text_that_cannot_be_decoded_fails_alone(
        self, models: Models, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with running_loop(models) as (loop, _, _):
            good, bad = Stream(make_params(1)), Stream(make_params(2))

            def fail(token: int) -> str:
                raise KeyError(token)

            monkeypatch.setattr(bad.sequence._text, "push", fail)
            for stream in (good, bad):
                loop.add(stream.sequence)
            async with asyncio.timeout(30):
                await asyncio.gather(good.sequence.done.wait(), bad.sequence.done.wait())
            assert "internal error" in str(bad.error)
            assert good.token_ids == plain[1]
            await wait_until(lambda: loop.num_live == 0)


class RaisingPolicy(FixedGamma):
    """Raises wherever it is asked to."""

    def __init__(self, method: str) -> None:
        super().__init__(2)
        self._method = method

    def _raise(self, method: str) -> None:
        if method == self._method:
            raise ZeroDivisionError(method)

    def choose(self, candidates: Sequence[Candidate], *, num_prefill_tokens: int) -> Decision:
        self._raise("choose")
        return super().choose(candidates, num_prefill_tokens=num_prefill_tokens)

    def select(self, *arguments: Any, **more: Any) -> list[int]:
        self._raise("select")
        return super().select(*arguments, **more)

    def observe(self, observed: Any) -> None:
        self._raise("observe")
        super().observe(observed)

    def forget(self, seq_id: str) -> None:
        self._raise("forget")
        super().forget(seq_id)


Breaks = Callable[[ProposeRequest], ProposeResult]
LYING: dict[str, Breaks] = {
    "too many": lambda r: ProposeResult(seq_id=r.seq_id, draft_tokens=(5,) * 200),
    "no tokens of ours": lambda r: ProposeResult(seq_id=r.seq_id, draft_tokens=(-7, 10**9)),
    "not a number": lambda r: ProposeResult(
        seq_id=r.seq_id, draft_tokens=(5, 6), confidences=(math.nan, math.inf)
    ),
    "too many confidences": lambda r: ProposeResult(
        seq_id=r.seq_id, draft_tokens=(5,), confidences=(0.5, 0.5, 0.5)
    ),
    "another's": lambda _: ProposeResult(seq_id="nobody", draft_tokens=(5, 6)),
    "lacks what never was": lambda r: ProposeResult(seq_id=r.seq_id, needs_tokens_from=10**6),
    "lacks less than nothing": lambda r: ProposeResult(seq_id=r.seq_id, needs_tokens_from=-3),
    "an error": lambda r: ProposeResult(seq_id=r.seq_id, error="cannot"),
}


class LyingDrafter(ScriptedDrafter):
    def __init__(self, lie: Breaks) -> None:
        super().__init__(lambda _: [])
        self._lie = lie

    async def call(
        self, replica_id: str | None, batch: Sequence[ProposeRequest], *, timeout_s: float
    ) -> Reply[ProposeResult]:
        reply = await super().call(replica_id, batch, timeout_s=timeout_s)
        results = tuple(
            self._lie(request) if request.k else result
            for request, result in zip(batch, reply.results, strict=True)
        )
        return replace(reply, results=results)


class ShortDrafter(ScriptedDrafter):
    """Answers with fewer results than it was asked for."""

    async def call(
        self, replica_id: str | None, batch: Sequence[ProposeRequest], *, timeout_s: float
    ) -> Reply[ProposeResult]:
        return replace(await super().call(replica_id, batch, timeout_s=timeout_s), results=())


class RaisingDrafter(ScriptedDrafter):
    async def call(
        self,
        replica_id: str | None,  # noqa: ARG002
        batch: Sequence[ProposeRequest],  # noqa: ARG002
        *,
        timeout_s: float,  # noqa: ARG002
    ) -> Reply[ProposeResult]:
        raise IndexError("index out of range in self")


class TestDraftSide:
    async def check_exact(self, models: Models, plain: list[list[int]], **options: Any) -> None:
        policy = options.pop("policy", None)
        async with running_loop(models, **options) as (loop, targets, observer):
            if policy is not None:
                loop.use_gamma(policy)
            params = [make_params(seed) for seed in (1, 2, 3)]
            streams = await run_all(loop, params, concurrency=3)
            assert [stream.token_ids for stream in streams] == plain[1:4]
            await wait_until(lambda: loop.num_live == 0 and targets.num_used_blocks == 0)
            assert observer.num_live == 0

    @pytest.mark.parametrize("method", ["choose", "select", "observe", "forget"])
    @pytest.mark.parametrize("overlap", [False, True])
    async def test_a_policy_that_raises_costs_drafts_only(
        self,
        method: str,
        overlap: bool,
        models: Models,
        plain: list[list[int]],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        policy, drafts = RaisingPolicy(method), model_drafts(models)
        await self.check_exact(models, plain, policy=policy, drafts=drafts, overlap=overlap)
        assert "ZeroDivisionError" in caplog.text

    @pytest.mark.parametrize("overlap", [False, True])
    @pytest.mark.parametrize("lie", LYING)
    async def test_a_drafter_that_lies_changes_nothing(
        self, lie: str, overlap: bool, models: Models, plain: list[list[int]]
    ) -> None:
        await self.check_exact(models, plain, drafts=LyingDrafter(LYING[lie]), overlap=overlap)

    @pytest.mark.parametrize("overlap", [False, True])
    @pytest.mark.parametrize("kind", [ShortDrafter, RaisingDrafter])
    async def test_a_drafter_that_fails_changes_nothing(
        self, kind: type[ScriptedDrafter], overlap: bool, models: Models, plain: list[list[int]]
    ) -> None:
        await self.check_exact(models, plain, drafts=kind(lambda _: [5]), overlap=overlap)

    def test_a_policy_learns_nothing_that_is_not_finite(self) -> None:
        controller = DynamicGamma()
        candidates = [Candidate(seq_id="s", max_gamma=4)]
        for confidence in (math.nan, math.inf, -math.inf, -1.0, 0.0, 7.0):
            decision = controller.choose(candidates, num_prefill_tokens=0)
            drafts = {"seq_id": "s", "num_draft_tokens": 1, "confidences": (confidence,)}
            assert controller.select(decision, [Drafted(**drafts)]) in ([0], [1])
            for num_accepted in (0, 1):
                outcome = Outcome(
                    num_tested=1,
                    num_accepted=num_accepted,
                    num_committed=1 + num_accepted,
                    **drafts,
                )
                controller.observe(
                    ObservedRound(
                        reason=decision.reason, outcomes=(outcome,), num_sequences=1,
                        num_drafted=1, longest_draft=1, num_tokens=2, num_committed=1,
                        draft_s=0.0, draft_compute_s=0.0, draft_further_s=0.0,
                        verify_s=0.0, verify_compute_s=0.0, router_s=0.0, round_s=0.0,
                    )
                )  # fmt: skip
        decision = controller.choose(candidates, num_prefill_tokens=10)
        assert all(map(math.isfinite, decision.stop_below))


class TestLeaks:
    @pytest.mark.parametrize("replica_id", [None, "replica-0"])
    async def test_a_round_cancelled_before_it_starts_leaves_nothing(
        self, replica_id: str | None, models: Models
    ) -> None:
        """On a replica that is known, as after a preemption, and on one yet to be chosen."""
        async with running_loop(models) as (loop, targets, observer):
            stream = Stream(make_params(1))
            stream.sequence.target.replica_id = replica_id
            loop.add(stream.sequence)
            loop.cancel(stream.sequence)  # before the first step of the round's task
            await wait_until(lambda: loop.num_live == 0)
            await wait_until(lambda: targets.num_used_blocks == 0)
            assert observer.num_live == 0
            (after,) = await run_all(loop, [make_params(2)], concurrency=1)
            assert after.error is None

    async def test_a_hang_up_in_the_first_round_frees_its_blocks_wherever_they_are(
        self, models: Models
    ) -> None:
        async with running_loop(models, num_targets=3) as (loop, targets, _):
            streams = [
                Stream(replace(make_params(seed), prompt=(5 + seed,) * 200)) for seed in range(3)
            ]
            for stream in streams:
                loop.add(stream.sequence)
            await wait_until(lambda: targets.num_sequences == 3)
            for stream in streams:
                loop.cancel(stream.sequence)
            await wait_until(lambda: loop.num_live == 0)
            assert (targets.num_used_blocks, targets.num_sequences) == (0, 0)
            assert targets.num_steps < 3 * 7  # each prompt needs seven


class TestCounts:
    @pytest.mark.parametrize("stop_at", range(1, 12))
    async def test_counts_speak_of_what_stands_in_the_text(
        self, stop_at: int, models: Models, plain: list[list[int]]
    ) -> None:
        """A text that ends within a long accepted draft: what is behind the end is not counted."""
        seed = next(seed for seed, text in enumerate(plain) if len({*text[:12]}) == 12)
        text = plain[seed]
        drafts = LocalWorkers(lambda: ModelDrafter(models.target, CACHE))
        async with running_loop(models, gamma=8, drafts=drafts) as (loop, _, observer):
            stream = Stream(make_params(seed), eos_token_ids=[text[stop_at]])
            loop.add(stream.sequence)
            await stream.sequence.done.wait()
            await wait_until(lambda: loop.num_live == 0)
            loop.use_gamma(FixedGamma(0))  # what is left to be recorded is
        counts, num_tokens = stream.sequence.counts, len(stream.token_ids)
        assert num_tokens == stop_at + 1
        assert counts.num_accepted <= counts.num_tested <= num_tokens
        outcomes = [o for record in observer.records for o in record.outcomes]
        # every round brings its accepted drafts and one token of the target's own
        num_rounds = len(observer.records)
        assert sum(o.num_accepted_in_text for o in outcomes) + num_rounds == num_tokens
        assert sum(o.num_accepted_in_text for o in outcomes) == counts.num_accepted
