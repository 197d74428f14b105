"""Lists of drafters over real workers: exact, in their order, whatever one of them does."""

import asyncio
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from deployments.router.drafting.chain import DrafterChain
from deployments.router.drafting.lookup import PromptLookup
from deployments.router.drafting.remote import PooledDrafter
from deployments.router.sequence import GenerationParams
from tests.deployments.loops import (
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
from tests.fakes import RecordingObserver, ScriptedDrafter

LISTS = [
    "prompt_lookup",
    "prompt_lookup,model",
    "model,prompt_lookup",
    "suffix",
    "suffix,model",
    "early_exit",
    "prompt_lookup,early_exit",
]


class Setting(NamedTuple):
    """How a list of drafters is tried."""

    gamma: int
    overlap: bool
    """Whether drafters go on during the verification."""
    concurrency: int


SETTINGS = [
    Setting(gamma=1, overlap=False, concurrency=16),
    Setting(gamma=4, overlap=True, concurrency=16),
    Setting(gamma=8, overlap=False, concurrency=1),
    Setting(gamma=8, overlap=True, concurrency=4),
]
"""Each list has one of them in its turn; `make fuzz` tries all of them with each."""
DOCS = Path(__file__).parents[4] / "docs" / "drafting.md"


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


async def tokens_of(
    models: Models, drafter: str, setting: Setting, all_params: list[GenerationParams]
) -> list[list[int]]:
    """What is written with a list of drafters, each of which must have drafts tested.

    Nothing may be left in the workers or the loop.
    """
    drafts = model_drafts(models)
    async with running_loop(
        models, gamma=setting.gamma, overlap=setting.overlap, drafts=drafts, drafter=drafter
    ) as (loop, targets, observer):
        streams = await run_all(loop, all_params, concurrency=setting.concurrency)
        assert num_tested(observer).keys() == {*drafter.split(",")}
        await wait_until(lambda: targets.num_used_blocks + drafts.num_used_blocks == 0)
        assert (loop.num_live, observer.num_live) == (0, 0)
        return [stream.token_ids for stream in streams]


class TestExactness:
    @pytest.mark.parametrize("drafter", LISTS)
    async def test_tokens_do_not_depend_on_the_list(
        self,
        drafter: str,
        has_all_combinations: bool,
        models: Models,
        repeating: list[GenerationParams],
        texts: list[list[int]],
    ) -> None:
        """Greedy and sampled, alone and batched; of those that are alone, every third."""
        own = SETTINGS[LISTS.index(drafter) % len(SETTINGS)]
        for setting in SETTINGS if has_all_combinations else [own]:
            some = slice(None, None, 3 if setting.concurrency == 1 else 1)
            assert await tokens_of(models, drafter, setting, repeating[some]) == texts[some]

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
