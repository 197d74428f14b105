"""Lists of drafters over real workers: exact, in their order, whatever one of them does."""

import asyncio
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cluster import bundled
from deployments.router.drafting import remote
from deployments.router.drafting.chain import DrafterChain
from deployments.router.drafting.lookup import PromptLookup
from deployments.router.drafting.protocol import DraftRequest, Offer, Proposed
from deployments.router.drafting.remote import PooledDrafter
from deployments.router.policy.gamma import FixedGamma
from deployments.router.sequence import GenerationParams
from deployments.router.sequence import Sequence as LiveSequence
from tests.deployments.loops import (
    CACHE,
    GREEDY,
    Models,
    Stream,
    drafters_of,
    make_params,
    model_drafts,
    run_all,
    running_loop,
    wait_until,
)
from tests.fakes import LocalWorkers, RecordingObserver, ScriptedDrafter
from workers.drafters.model import ModelDrafter
from workers.model import load_model
from workers.paged_model import CacheOptions
from workers.types import DraftTokens, SamplingParams

NUM_COPIED = 300
LISTS = [
    "prompt_lookup",
    "prompt_lookup,model",
    "model,prompt_lookup",
    "suffix",
    "suffix,model",
    "early_exit",
    "prompt_lookup,early_exit",
]
DOCS = Path(__file__).parents[4] / "docs" / "drafting.md"
CODE = """
class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

"""


def num_tested(observer: RecordingObserver) -> Counter[str]:
    """Tested drafts by source."""
    outcomes = [outcome for record in observer.records for outcome in record.outcomes]
    return sum((Counter({o.source: o.num_tested}) for o in outcomes), Counter())


@pytest.fixture(scope="module")
def repeating(all_params: list[GenerationParams]) -> list[GenerationParams]:
    """Every other prompt stands there twice."""
    return [
        replace(params, prompt=params.prompt * 2) if params.seed % 2 else params
        for params in all_params
    ]


@pytest.fixture(scope="module")
def texts(models: Models, repeating: list[GenerationParams]) -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with running_loop(models, gamma=0) as (loop, _, _):
            return [s.token_ids for s in await run_all(loop, repeating, concurrency=1)]

    return asyncio.run(run())


class TestExactness:
    @pytest.mark.parametrize(
        ("gamma", "overlap", "concurrency"),
        [(1, False, 16), (4, True, 16), (8, False, 1), (8, True, 4)],
    )
    @pytest.mark.parametrize("drafter", LISTS)
    async def test_tokens_do_not_depend_on_the_list(
        self,
        drafter: str,
        gamma: int,
        overlap: bool,
        concurrency: int,
        models: Models,
        repeating: list[GenerationParams],
        texts: list[list[int]],
    ) -> None:
        """Greedy and sampled, alone and batched."""
        drafts = model_drafts(models)
        async with running_loop(
            models, gamma=gamma, overlap=overlap, drafts=drafts, drafter=drafter
        ) as (loop, targets, observer):
            streams = await run_all(loop, repeating, concurrency=concurrency)
            assert [stream.token_ids for stream in streams] == texts
            assert num_tested(observer).keys() == {*drafter.split(",")}
            await wait_until(lambda: targets.num_used_blocks + drafts.num_used_blocks == 0)
            assert (loop.num_live, observer.num_live) == (0, 0)

    async def test_a_dynamic_gamma_drafts_by_lookup_alone(
        self, models: Models, repeating: list[GenerationParams], texts: list[list[int]]
    ) -> None:
        async with running_loop(models, gamma="dynamic", drafter="prompt_lookup") as (loop, _, _):
            streams = await run_all(loop, repeating, concurrency=4)
            assert [stream.token_ids for stream in streams] == texts

    async def test_what_others_wrote_is_drafted_and_changes_nothing(
        self, models: Models, repeating: list[GenerationParams], texts: list[list[int]]
    ) -> None:
        """The same requests twice: the second time their texts are known."""
        async with running_loop(models, gamma=8, drafter="suffix") as (loop, _, observer):
            for _ in range(2):
                num_before = len(observer.records)
                streams = await run_all(loop, repeating, concurrency=4)
                assert [stream.token_ids for stream in streams] == texts
            outcomes = [o for record in observer.records[num_before:] for o in record.outcomes]
        assert sum(o.num_accepted for o in outcomes) > 0.6 * sum(map(len, texts))

    @pytest.mark.parametrize("drafter", ["none", "suffix,prompt_lookup,model"])
    async def test_predictions_and_choices_of_drafters_change_nothing(
        self,
        drafter: str,
        models: Models,
        repeating: list[GenerationParams],
        texts: list[list[int]],
    ) -> None:
        """Each request chooses another drafter, and predicts its text with an error."""
        choices = [None, "predicted", "suffix", "prompt_lookup", "model"]
        asking = [
            replace(
                params,
                drafter=choices[index % len(choices)],
                prediction=tuple(text[:9] + text[11:]),
            )
            for index, (params, text) in enumerate(zip(repeating, texts, strict=True))
        ]
        drafts = model_drafts(models)
        async with running_loop(models, drafts=drafts, drafter=drafter) as (loop, _, observer):
            streams = await run_all(loop, asking, concurrency=16)
            assert [stream.token_ids for stream in streams] == texts
        tested = num_tested(observer)
        assert tested["predicted"] > 50
        assert tested.keys() == ({"predicted"} if drafter == "none" else {*choices[1:]})
        for stream in streams:
            predicted = stream.sequence.predicted_counts
            is_asked = stream.sequence.params.drafter in (None, "predicted")
            assert (predicted.num_accepted > 0) is is_asked
            assert predicted.num_accepted <= stream.sequence.counts.num_accepted


class TestExample:
    """The drafter that docs/drafting.md has for an example."""

    def make(self) -> Any:
        (code,) = re.findall(r"^```python\n(.*?)^```$", DOCS.read_text(), re.DOTALL | re.MULTILINE)
        names: dict[str, Any] = {}
        exec(code, names)  # ours
        return names["Successors"](is_last=True)

    async def test_it_drafts_and_changes_no_text(
        self, models: Models, repeating: list[GenerationParams], texts: list[list[int]]
    ) -> None:
        drafter = self.make()
        async with running_loop(models, drafters=[drafter]) as (loop, _, observer):
            streams = await run_all(loop, repeating, concurrency=16)
            assert [stream.token_ids for stream in streams] == texts
        assert num_tested(observer)["successors"] > 50
        assert not drafter._num_read

    def test_it_drafts_what_followed_last(self) -> None:
        sequence = Stream(replace(make_params(1), prompt=(1, 2, 3, 1, 4, 1))).sequence
        assert self.make().draft(sequence, 3).tokens == (4, 1, 4)


class TestOrder:
    async def test_a_model_that_is_behind_is_stood_in_for(self, models: Models) -> None:
        """Until it has read the prompt, the next drafter speaks; from then on, it does."""
        drafts = model_drafts(models)
        drafts.delay_s = 0.03
        params = make_params(3, max_tokens=60, sampling=GREEDY)
        params = replace(params, prompt=params.prompt * 3)
        async with running_loop(models, drafts=drafts, drafter="model,prompt_lookup") as (
            loop,
            _,
            observer,
        ):
            await run_all(loop, [params], concurrency=1)
        sources = [record.outcomes[0].source for record in observer.records if record.outcomes]
        first = sources.index("model")
        assert {*sources[:first]} == {"prompt_lookup"}
        assert {*sources[first:]} == {"model"}

    def test_a_model_whose_context_has_ended_is_stood_in_for(self) -> None:
        pool = PooledDrafter(ScriptedDrafter(lambda _: []), timeout_s=5.0, max_model_len=50)
        chain = DrafterChain([pool, PromptLookup()])
        sequence = Stream(replace(make_params(1), prompt=(5, 6) * 23)).sequence
        offer = pool.offer(sequence, 8)
        assert offer is not None
        assert offer.max_tokens == 4
        assert len(chain.turn_of(sequence, 8).behind) == 1
        sequence.tokens += [5, 6, 5, 6]
        assert pool.offer(sequence, 8) is None
        turn = chain.turn_of(sequence, 8)
        assert (turn.source, turn.max_tokens, turn.behind) == ("prompt_lookup", 8, ())

    def test_who_is_sure_speaks_before_a_model_and_who_is_not_leaves_it_to_it(self) -> None:
        chain = DrafterChain(drafters_of("prompt_lookup,model", ScriptedDrafter(lambda _: [])))
        sure = Stream(replace(make_params(1), prompt=tuple(range(10)) * 2)).sequence
        unsure = Stream(replace(make_params(2), prompt=(1, 2, 3, 4, 1, 2))).sequence
        turn = chain.turn_of(sure, 4)
        assert (turn.source, turn.in_hand.tokens) == ("prompt_lookup", (0, 1, 2, 3))
        assert turn.remote is None
        turn = chain.turn_of(unsure, 4)
        assert (turn.source, turn.max_tokens, turn.in_hand.tokens) == ("model", 4, ())
        assert turn.remote is None  # nobody has told it of the sequence
        assert [drafter.source for drafter in turn.behind] == ["model"]

    @pytest.mark.parametrize("drafter", ["prompt_lookup", "suffix", "predicted"])
    def test_the_drafter_that_a_request_names_speaks_even_if_it_is_not_sure(
        self, drafter: str
    ) -> None:
        chain = DrafterChain(
            drafters_of("prompt_lookup,suffix,model", ScriptedDrafter(lambda _: []))
        )
        named = replace(
            make_params(2), prompt=(1, 2, 3, 4, 1, 2), prediction=(2, 9), drafter=drafter
        )
        turn = chain.turn_of(Stream(named).sequence, 4)
        assert turn.source == drafter
        assert turn.in_hand.tokens
        assert chain.turn_of(Stream(replace(named, drafter=None)).sequence, 4).source == "model"

    def test_nothing_is_drafted_where_there_is_no_room_or_no_one(self) -> None:
        sequence = Stream(replace(make_params(1), prompt=(1, 2) * 4)).sequence
        assert DrafterChain([PromptLookup()]).turn_of(sequence, 0).source == ""
        assert DrafterChain([]).turn_of(sequence, 4).source == ""


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


class TestFaults:
    async def check_exact(self, models: Models, **options: Any) -> RecordingObserver:
        params = [
            replace(make_params(seed), prompt=make_params(seed).prompt * 3) for seed in (1, 2, 3)
        ]
        async with running_loop(models, gamma=0) as (loop, _, _):
            expected = [s.token_ids for s in await run_all(loop, params, concurrency=3)]
        async with running_loop(models, **options) as (loop, targets, observer):
            streams = await run_all(loop, params, concurrency=3)
            assert [stream.token_ids for stream in streams] == expected
            await wait_until(lambda: loop.num_live == 0 and targets.num_used_blocks == 0)
        return observer

    @pytest.mark.parametrize("method", ["draft", "forget"])
    async def test_a_local_drafter_that_raises_is_silent_for_that_sequence(
        self, method: str, models: Models, caplog: pytest.LogCaptureFixture
    ) -> None:
        drafter, after = Raising(method), PromptLookup()
        after.source = "after"
        observer = await self.check_exact(models, drafters=[drafter, after])
        assert drafter.num_raised == 1
        assert "no such thing" in caplog.text
        drafted = {o.seq_id: o.source for record in observer.records for o in record.outcomes}
        assert drafted["s1"] == ("after" if method == "draft" else "prompt_lookup")
        assert drafted["s2"] == "prompt_lookup"

    @pytest.mark.parametrize("lie", LIES)
    async def test_a_local_drafter_that_lies_changes_nothing(
        self, lie: str, models: Models
    ) -> None:
        observer = await self.check_exact(models, drafters=[Lying(LIES[lie])])
        outcomes = [outcome for record in observer.records for outcome in record.outcomes]
        assert {outcome.source for outcome in outcomes} <= {"prompt_lookup"}
        assert max((o.num_draft_tokens for o in outcomes), default=0) <= 4

    @pytest.mark.parametrize("overlap", [False, True])
    @pytest.mark.parametrize("method", ["offer", "catch_up", "propose", "forget"])
    async def test_a_remote_drafter_that_raises_changes_nothing(
        self, method: str, overlap: bool, models: Models, caplog: pytest.LogCaptureFixture
    ) -> None:
        await self.check_exact(models, drafters=[Careless(method)], overlap=overlap)
        assert "ZeroDivisionError" in caplog.text


class TestPool:
    async def test_a_sequence_that_ends_while_its_drafter_reads_it_is_freed_there(
        self, models: Models
    ) -> None:
        drafts = LocalWorkers(lambda: ModelDrafter(models.draft, CACHE))
        pool = PooledDrafter(drafts, timeout_s=5.0, max_model_len=256)
        drafts.delay_s = 0.02
        sequence = Stream(make_params(4)).sequence
        pool.catch_up(sequence)
        pool.catch_up(sequence)
        assert pool.offer(sequence, 4) == Offer(max_tokens=4, is_ready=False)
        await wait_until(lambda: bool(drafts.calls))
        sequence.is_cancelled = True
        pool.forget(sequence)
        assert not pool.is_idle
        await wait_until(lambda: pool.is_idle)
        assert len(drafts.calls) == 1
        await wait_until(lambda: drafts.num_sequences + drafts.num_used_blocks == 0)
        # what is begun after the end, as by a prefetch, leaves nothing behind either
        pool.catch_up(sequence)
        assert await pool.propose([DraftRequest(sequence=sequence, k=2)]) == Proposed()
        assert pool.is_idle
        await drafts.close()

    async def test_a_sequence_that_ends_before_its_drafter_reads_it_is_not_read(self) -> None:
        asked = []
        pool = PooledDrafter(ScriptedDrafter(asked.append), timeout_s=5.0, max_model_len=256)
        sequence = Stream(make_params(4)).sequence
        pool.catch_up(sequence)
        sequence.is_cancelled = True
        pool.forget(sequence)
        await wait_until(lambda: pool.is_idle)
        assert not asked

    async def test_a_sequence_far_ahead_of_its_drafter_is_read_in_the_background(
        self, models: Models
    ) -> None:
        """As when another drafter has spoken for it for long."""
        cache = CacheOptions(block_size=4, max_num_seqs=32)
        drafts = LocalWorkers(lambda: ModelDrafter(models.draft, cache))
        pool = PooledDrafter(drafts, timeout_s=5.0, max_model_len=4096)
        sequence = Stream(make_params(4)).sequence
        for num_more, is_ready in ((0, False), (remote.MAX_BEHIND, True), (1, False)):
            sequence.tokens += [5] * num_more
            offer = pool.offer(sequence, 4)
            assert offer is not None
            assert offer.is_ready is is_ready
            if num_more == 0:
                pool.catch_up(sequence)
                await wait_until(lambda: not pool._tasks)
        await drafts.close()


@pytest.fixture(scope="module")
def pair() -> Models:
    target, draft = map(bundled.resolve, (bundled.TARGET_NAME, bundled.DRAFT_NAME))
    return Models(
        target=load_model(target, dtype="float32"), draft=load_model(draft, dtype="float32")
    )


@pytest.mark.parametrize("temperature", [0.0, 0.2])
@pytest.mark.parametrize("drafter", ["prompt_lookup", "prompt_lookup,model"])
async def test_copied_text_is_drafted_by_lookup(
    drafter: str, temperature: float, pair: Models
) -> None:
    """Code stands in the prompt three times, and the bundled target goes on to repeat itself."""
    tokenizer = AutoTokenizer.from_pretrained(bundled.resolve(bundled.TARGET_NAME))
    params = GenerationParams(
        prompt=tuple(tokenizer.encode(CODE * 3 + CODE[:30])),
        max_tokens=NUM_COPIED,
        sampling=SamplingParams(temperature=temperature),
        seed=5,
        ignore_eos=True,
    )
    texts, num_rounds = [], []
    for gamma in (0, 16):
        async with running_loop(
            pair,
            gamma=gamma,
            drafts=model_drafts(pair),
            drafter=drafter,
            cache=CacheOptions(max_num_seqs=4, max_model_len=1024),
            max_gamma=16,
        ) as (loop, _, observer):
            (stream,) = await run_all(loop, [params], concurrency=1)
            loop.use_gamma(FixedGamma(0))  # what is left to be recorded is
        texts.append(stream.token_ids)
        num_rounds.append(len(observer.records))
    assert texts[0] == texts[1]
    assert num_rounds[0] == NUM_COPIED
    assert num_rounds[1] < NUM_COPIED / 3
    outcomes = [outcome for record in observer.records for outcome in record.outcomes]
    by_lookup = [outcome for outcome in outcomes if outcome.source == "prompt_lookup"]
    num_accepted = sum(outcome.num_accepted for outcome in by_lookup)
    assert num_accepted > NUM_COPIED / 3
    assert num_accepted / sum(outcome.num_tested for outcome in by_lookup) > 0.75
