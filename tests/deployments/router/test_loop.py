"""The round loop over real workers in this process: what it asks of them and when, and
that nothing is left behind."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from itertools import pairwise

import pytest

from deployments.router.loop import LoopOptions
from deployments.router.policy.gamma import Candidate, Decision, FixedGamma, ObservedRound
from deployments.router.sequence import FinishReason, GenerationParams
from deployments.router.sequence import Sequence as LiveSequence
from tests.deployments.loops import (
    CACHE,
    NUM_TOKENS,
    Models,
    Stream,
    make_params,
    model_drafts,
    run_all,
    running_loop,
    wait_until,
)
from tests.fakes import CharacterTokenizer, LocalWorkers, ScriptedDrafter
from workers.drafters.model import ModelDrafter
from workers.errors import GenerationFailedError, TargetUnavailableError
from workers.grammar_masks import GrammarMasks
from workers.kv_cache import CachedSequence


class TestDrafters:
    async def test_a_slow_drafter_costs_its_deadline_and_no_token(self, models: Models) -> None:
        drafts = model_drafts(models)
        async with running_loop(models, drafts=drafts, draft_timeout_s=0.01) as (
            loop,
            _,
            observer,
        ):
            drafts.delay_s = 0.1
            (stream,) = await run_all(loop, [make_params(1)], concurrency=1)
            assert len(stream.token_ids) == NUM_TOKENS
            assert not any(record.outcomes for record in observer.records)

    async def test_the_last_token_is_not_drafted(self, models: Models) -> None:
        asked: list[int] = []

        def draft(request: object) -> list[int]:
            asked.append(request.k)  # type: ignore[attr-defined]
            return []

        async with running_loop(models, gamma=8, drafts=ScriptedDrafter(draft)) as (loop, _, _):
            await run_all(loop, [make_params(1, max_tokens=5)], concurrency=1)
        # the first call only announces the sequence; every round commits one token
        assert asked == [0, 3, 2, 1]

    async def test_first_rounds_tell_nothing_of_what_drafts_cost(self, models: Models) -> None:
        """They wait for the step that runs, so their tokens would look dear."""
        async with running_loop(models, drafts=model_drafts(models)) as (loop, _, observer):
            await run_all(loop, [make_params(seed) for seed in range(4)], concurrency=2)
        assert sum(record.is_prefill for record in observer.records) == 4
        assert not any(r.is_prefill and r.verify_s is not None for r in observer.records)
        assert any(record.verify_s is not None for record in observer.records)

    async def test_rounds_beside_a_prompt_tell_nothing_of_what_drafts_cost(
        self, models: Models
    ) -> None:
        """Its tokens attend to all that came before, so a draft would seem as dear as they are."""
        long = replace(make_params(2, max_tokens=1), prompt=(5,) * 200)
        async with running_loop(models) as (loop, _, observer):
            running = Stream(make_params(1, max_tokens=150))
            loop.add(running.sequence)
            await wait_until(lambda: len(observer.records) > 10)
            await run_all(loop, [long], concurrency=1)
            await running.sequence.done.wait()
        rounds = [record for record in observer.records if not record.is_prefill]
        # that a prompt has come is known from the round after the first that it shared, and what
        # is left of it at last is run like a few tokens of a text
        beside = [record for record in rounds if record.num_tokens > 1][1:-1]
        assert len(beside) > 3
        assert not any(record.verify_s for record in beside)
        assert all(record.verify_s for record in rounds[:5] + rounds[-5:])

    async def test_the_controller_is_told_of_prompts_beside(self, models: Models) -> None:
        told: list[int] = []

        class Recorded(FixedGamma):
            def choose(
                self, candidates: Sequence[Candidate], *, num_prefill_tokens: int
            ) -> Decision:
                told.append(num_prefill_tokens)
                return super().choose(candidates, num_prefill_tokens=num_prefill_tokens)

        running = make_params(1, max_tokens=150)
        long = replace(make_params(2), prompt=(5,) * 200)
        async with running_loop(models) as (loop, _, _):
            loop.use_gamma(Recorded(1))
            stream = Stream(running)
            loop.add(stream.sequence)
            await wait_until(lambda: len(told) >= 5)
            assert set(told) == {0}
            await run_all(loop, [long], concurrency=1)
            num_told = len(told)
            await stream.sequence.done.wait()
        assert max(told) > 0
        assert set(told[num_told + 1 :]) == {0}

    @pytest.mark.parametrize(("gamma", "workers"), [(2, "drafters"), (0, "targets")])
    async def test_rounds_are_learnt_from_while_workers_are_busy(
        self, gamma: int, workers: str, models: Models
    ) -> None:
        """With the next round: while drafters are, if they are asked, else while the target is."""
        events: list[str] = []

        class Recorded(FixedGamma):
            def observe(self, observed: ObservedRound) -> None:
                events.append("learnt")
                super().observe(observed)

        drafts = model_drafts(models)
        async with running_loop(models, drafts=drafts) as (loop, targets, _):
            loop.use_gamma(Recorded(gamma))
            drafts.before_call = lambda: (
                events.append("drafters") if drafts.calls[-1][0].k else None
            )
            targets.before_call = lambda: events.append("targets")
            await run_all(loop, [make_params(1)], concurrency=1)
        asked = [place for place, event in enumerate(events) if event == workers]
        between = [events[place + 1 : later] for place, later in pairwise(asked[2:-2])]
        last = ["targets"] if workers == "drafters" else []
        assert between
        assert all(others == ["learnt", *last] for others in between)

    @pytest.mark.parametrize("gamma", [16, 64])
    async def test_a_long_accepted_draft_leaves_its_drafter_ready(
        self, gamma: int, models: Models
    ) -> None:
        """It holds its own drafts, so it is not behind by as many tokens as were committed."""
        drafts = LocalWorkers(lambda: ModelDrafter(models.target, CACHE))
        params = make_params(1, max_tokens=150)
        async with running_loop(models, gamma=gamma, max_gamma=gamma, drafts=drafts) as (
            loop,
            _,
            observer,
        ):
            await run_all(loop, [params], concurrency=1)
            is_drafted = [bool(record.outcomes) for record in observer.records]
        assert all(is_drafted[is_drafted.index(True) : -1])
        assert is_drafted.count(True) >= 150 // (gamma + 1)

    async def test_more_drafts_than_asked_for_do_no_harm(self, models: Models) -> None:
        drafter = ScriptedDrafter(lambda request: [5] * (request.k + 20))
        async with running_loop(models, drafts=drafter) as (loop, _, _):
            (stream,) = await run_all(loop, [make_params(1)], concurrency=1)
        async with running_loop(models, gamma=0) as (loop, _, _):
            (plain,) = await run_all(loop, [make_params(1)], concurrency=1)
        assert stream.token_ids == plain.token_ids


async def test_calls_are_nobodys_children(models: Models) -> None:
    """Serve keeps the request in a context variable, gives calls made under it the request's id
    (two at a time would be taken for one) and cancels them with it. A round serves many."""
    request: ContextVar[str] = ContextVar("request")
    seen: list[str | None] = []
    drafts = model_drafts(models)
    async with running_loop(models, drafts=drafts) as (loop, targets, _):
        targets.before_call = drafts.before_call = lambda: seen.append(request.get(None))
        request.set("a request")
        await run_all(loop, [make_params(seed) for seed in range(3)], concurrency=3)
        left = Stream(make_params(4))
        loop.add(left.sequence)
        loop.cancel(left.sequence)
        await wait_until(lambda: targets.num_used_blocks == 0)
    assert set(seen) == {None}


async def test_the_next_round_is_sent_before_texts_are_handed_out(models: Models) -> None:
    """So that the router writes to clients while the workers compute."""
    num_tokens = 10
    deltas: asyncio.Queue[object] = asyncio.Queue()
    sequence = LiveSequence(
        "s",
        make_params(0, max_tokens=num_tokens),
        decoder=CharacterTokenizer(),
        eos_token_ids=(),
        emit=deltas.put_nowait,
    )
    num_sent = []
    async with running_loop(models, gamma=0) as (loop, targets, _), asyncio.timeout(30):
        loop.add(sequence)
        for _ in range(num_tokens):
            await deltas.get()
            num_sent.append(len(targets.calls))
    assert num_sent[4] > 5


async def test_a_sequence_with_slow_masks_has_rounds_of_its_own(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target makes others wait for none of its masks, and needs one of each for no drafts."""
    params = [make_params(seed) for seed in range(3)]
    async with running_loop(models, gamma=0) as (loop, _, _):
        plain = await run_all(loop, params, concurrency=1)

    def is_slow(_: GrammarMasks, sequence: CachedSequence) -> bool:
        return sequence.seq_id == "s1"

    monkeypatch.setattr(GrammarMasks, "is_slow", is_slow)
    async with running_loop(models, drafts=model_drafts(models)) as (loop, targets, observer):
        streams = await run_all(loop, params, concurrency=3)
        rounds = [[request.seq_id for request in batch] for batch in targets.calls]
        requests = [request for batch in targets.calls for request in batch]
    assert [stream.token_ids for stream in streams] == [stream.token_ids for stream in plain]
    assert all(len(members) == 1 for members in rounds if "s1" in members)
    assert any(len(members) == 2 for members in rounds)
    assert {request.seq_id for request in requests if request.draft_tokens} == {"s0", "s2"}
    alone = [record for record in observer.records if not record.outcomes]
    assert len(alone) >= NUM_TOKENS
    assert not any(record.verify_s for record in alone)


class TestEnds:
    async def plain(self, models: Models, params: GenerationParams) -> Stream:
        async with running_loop(models, gamma=0) as (loop, _, _):
            (stream,) = await run_all(loop, [params], concurrency=1)
            return stream

    async def test_eos_within_accepted_drafts_ends_the_text(self, models: Models) -> None:
        plain = await self.plain(models, make_params(3))
        end = 10
        eos = plain.token_ids[end]
        assert eos not in plain.token_ids[:end]
        drafter = ScriptedDrafter(
            lambda request: plain.token_ids[
                request.base_len + len(request.new_tokens) - request.prompt_len :
            ][: request.k]
        )
        async with running_loop(models, gamma=8, drafts=drafter) as (loop, _, _):
            stream = Stream(make_params(3), eos_token_ids=[eos])
            loop.add(stream.sequence)
            await stream.sequence.done.wait()
            assert stream.token_ids == plain.token_ids[: end + 1]
            assert stream.deltas[-1].finish_reason is FinishReason.STOP
            assert stream.text == CharacterTokenizer().decode(
                plain.token_ids[:end], skip_special_tokens=True
            )
            ignoring = Stream(make_params(4, ignore_eos=True), eos_token_ids=[eos])
            loop.add(ignoring.sequence)
            await ignoring.sequence.done.wait()
            assert len(ignoring.token_ids) == NUM_TOKENS
            assert ignoring.deltas[-1].finish_reason is FinishReason.LENGTH

    async def test_a_stop_string_ends_the_text_before_it(self, models: Models) -> None:
        plain = await self.plain(models, make_params(3))
        stop = plain.text[8:11]
        cut = plain.text.index(stop)
        drafts = model_drafts(models)
        async with running_loop(models, drafts=drafts) as (loop, targets, _):
            (stream,) = await run_all(loop, [make_params(3, stop=(stop,))], concurrency=1)
            assert stream.text == plain.text[:cut]
            assert stream.token_ids == plain.token_ids[: cut + 3]
            assert stream.deltas[-1].finish_reason is FinishReason.STOP
            await wait_until(lambda: targets.num_used_blocks == 0)

    @pytest.mark.parametrize("max_tokens", [1, 2, 5])
    async def test_max_tokens_is_met_exactly(self, max_tokens: int, models: Models) -> None:
        async with running_loop(models, gamma=8, drafts=model_drafts(models)) as (loop, _, _):
            params = make_params(2, max_tokens=max_tokens)
            (stream,) = await run_all(loop, [params], concurrency=1)
            assert len(stream.token_ids) == max_tokens


class TestCancel:
    async def cancel_all(
        self, models: Models, reach: Callable[[list[Stream], LocalWorkers], Awaitable[object]]
    ) -> None:
        drafts = model_drafts(models)
        async with running_loop(models, drafts=drafts) as (loop, targets, _):
            streams = [Stream(make_params(seed)) for seed in range(8)]
            for stream in streams:
                loop.add(stream.sequence)
            await reach(streams, targets)
            for stream in streams:
                loop.cancel(stream.sequence)
            await wait_until(lambda: loop.num_live == 0)
            await wait_until(lambda: targets.num_used_blocks + drafts.num_used_blocks == 0)
            assert targets.num_sequences + drafts.num_sequences == 0

    async def test_before_anything_has_run(self, models: Models) -> None:
        await self.cancel_all(models, lambda *_: asyncio.sleep(0))

    async def test_during_prefill(self, models: Models) -> None:
        await self.cancel_all(
            models, lambda _, targets: wait_until(lambda: targets.num_used_blocks > 0)
        )

    async def test_mid_stream(self, models: Models) -> None:
        await self.cancel_all(
            models, lambda streams, _: asyncio.gather(*[s.first_delta.wait() for s in streams])
        )

    async def test_twice_or_after_the_end_is_nothing(self, models: Models) -> None:
        async with running_loop(models) as (loop, _, _):
            (stream,) = await run_all(loop, [make_params(1)], concurrency=1)
            loop.cancel(stream.sequence)
            loop.cancel(stream.sequence)
            assert stream.deltas[-1].finish_reason is FinishReason.LENGTH


class TestFailure:
    async def test_no_target_for_too_long_is_an_error_that_says_so(self, models: Models) -> None:
        options = LoopOptions(recovery_timeout_s=0.3)
        async with running_loop(models, options=options) as (loop, targets, _):
            targets.kill("replica-0")
            (stream,) = await run_all(loop, [make_params(1)], concurrency=1)
            assert isinstance(stream.error, TargetUnavailableError)
            assert "no target group answered" in str(stream.error)
            assert loop.num_live == 0

    async def test_a_target_that_comes_back_in_time_goes_on(self, models: Models) -> None:
        async with running_loop(models) as (loop, targets, _):
            plain = await run_all(loop, [make_params(1)], concurrency=1)
            targets.kill("replica-0")
            asyncio.get_running_loop().call_later(0.5, targets.start_replica)
            (stream,) = await run_all(loop, [make_params(1)], concurrency=1)
            assert stream.token_ids == plain[0].token_ids

    async def test_a_defect_ends_its_sequences_and_no_others(
        self, models: Models, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with running_loop(models) as (loop, targets, _):
            broken = Stream(make_params(1))
            targets.before_call = lambda: 1 / 0
            loop.add(broken.sequence)
            await broken.sequence.done.wait()
            targets.before_call = lambda: None
            assert isinstance(broken.error, GenerationFailedError)
            assert "division" not in str(broken.error)
            assert "ZeroDivisionError" in caplog.text
            (stream,) = await run_all(loop, [make_params(2)], concurrency=1)
            assert len(stream.token_ids) == NUM_TOKENS
