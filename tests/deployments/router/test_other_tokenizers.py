"""Drafts of a model with another tokenizer: the same tokens as without, through the round loop."""

import asyncio

import pytest

from deployments.router.sequence import GenerationParams
from tests.deployments.loops import CACHE, GREEDY, SAMPLED, Models, run_all, running_loop
from tests.fakes import LocalWorkers
from tests.tokenizers import KINDS, TEXTS, save_permuted, save_speaking_model, wrapped
from workers.cache_size import GIB
from workers.drafters.translated import make_drafter
from workers.grammar import Grammar
from workers.model import load_model
from workers.paged_model import CacheOptions
from workers.sampling_params import SamplingParams
from workers.types import HeterogeneousVocab
from workers.vocabulary import compare_vocabularies

MIXED = SamplingParams(
    temperature=0.9, top_p=0.9, presence_penalty=0.5, logit_bias=((40, 2.0), (41, -100.0))
)
MATCHING = SamplingParams(temperature=0.8, grammar=Grammar.regex("([a-z]{2,9} )+"))
PAIRS = {
    "a permuted vocabulary": ("byte level", "permuted"),
    "another of the same kind": ("byte level", "other byte level"),
    "another kind": ("sentence piece", "byte level"),
    "words": ("byte level", "words"),
}


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    names = {
        kind: save_speaking_model(folder / kind.replace(" ", "-"), kind, seed, family=None)
        for seed, kind in enumerate(KINDS)
    }
    return {**names, "permuted": save_permuted(names["byte level"], folder / "permuted")}


def all_params(kind: str) -> list[GenerationParams]:
    """Prompts of text, and of any tokens at all, special ones among them."""
    tokenizer = wrapped(kind)
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    odd = [token * 7919 % len(tokenizer) for token in range(30)]
    prompts = [
        *texts,
        [tokenizer.eos_token_id, *texts[0][:3]],
        odd,
        odd[:1],
        texts[0][:9],
        texts[1][:20],
    ]
    samplings = [GREEDY, SAMPLED, MIXED, MATCHING]
    return [
        GenerationParams(
            prompt=tuple(prompt),
            max_tokens=12,
            sampling=samplings[index % len(samplings)],
            seed=index,
        )
        for index, prompt in enumerate(prompts)
    ]


def plain(models: Models, kind: str) -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with running_loop(models, gamma=0) as (loop, _, _):
            streams = await run_all(loop, all_params(kind), concurrency=1)
            return [stream.token_ids for stream in streams]

    return asyncio.run(run())


@pytest.fixture(scope="module")
def targets(names: dict[str, str]) -> dict[str, tuple[Models, list[list[int]]]]:
    """Targets by their kind, and what they say without drafts."""
    found = {}
    for kind in ("byte level", "sentence piece"):
        models = Models.load(names[kind])
        found[kind] = models, plain(models, kind)
    return found


@pytest.mark.parametrize(
    ("pair", "method"),
    [
        (pair, method)
        for pair in PAIRS
        for method in ("intersection", "retokenize")
        # these have next to nothing in common, which is refused at the start
        if (pair, method) != ("words", "intersection")
    ],
)
async def test_tokens_do_not_depend_on_the_tokenizer_of_the_draft(
    pair: str,
    method: HeterogeneousVocab,
    names: dict[str, str],
    targets: dict[str, tuple[Models, list[list[int]]]],
) -> None:
    kind, draft = PAIRS[pair]
    models, expected = targets[kind]
    vocabulary = compare_vocabularies(names[kind], names[draft], method)
    model = load_model(names[draft], dtype="float32", device="cpu")
    drafts = LocalWorkers(
        lambda: make_drafter(model, vocabulary, CACHE, target=names[kind], max_batched_tokens=32)
    )
    async with running_loop(models, gamma=6, overlap=True, drafts=drafts) as (
        loop,
        _,
        observer,
    ):
        streams = await run_all(loop, all_params(kind), concurrency=8)
        assert [stream.token_ids for stream in streams] == expected
        outcomes = [outcome for record in observer.records for outcome in record.outcomes]
        assert sum(outcome.num_tested for outcome in outcomes) > 0
        if pair == "a permuted vocabulary" and method == "intersection":
            accepted = sum(outcome.num_accepted for outcome in outcomes)
            assert accepted > 0.9 * sum(outcome.num_tested for outcome in outcomes)


async def test_nothing_is_left_when_sequences_have_ended(
    names: dict[str, str], targets: dict[str, tuple[Models, list[list[int]]]]
) -> None:
    models, _ = targets["byte level"]
    vocabulary = compare_vocabularies(names["byte level"], names["sentence piece"], "retokenize")
    model = load_model(names["sentence piece"], dtype="float32", device="cpu")
    tight = CacheOptions(block_size=4, max_model_len=128, kv_cache_gib=160 * model.slot_bytes / GIB)
    drafts = LocalWorkers(
        lambda: make_drafter(model, vocabulary, tight, target=names["byte level"])
    )
    async with running_loop(models, drafts=drafts) as (loop, _, _):
        await run_all(loop, all_params("byte level"), concurrency=12)
        (replica,) = drafts.replicas.values()
        worker = replica.worker
        assert worker.num_preemptions > 0
        assert len(worker) == worker.num_sequences == worker.num_used_blocks == 0
        worker.check_integrity()
