"""Text that is copied from the prompt, with the bundled pair."""

import asyncio

import pytest
from transformers import AutoTokenizer

from cluster import bundled
from deployments.router.policy.gamma import FixedGamma
from deployments.router.sequence import GenerationParams
from tests.deployments.loops import Models, model_drafts, run_all, running_loop
from tests.fakes import RecordingObserver
from workers.model import load_model
from workers.paged_model import CacheOptions
from workers.sampling_params import SamplingParams

NUM_COPIED = 120
"""Tokens, of which the code has ninety."""
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


@pytest.fixture(scope="module")
def pair() -> Models:
    target, draft = map(bundled.resolve, (bundled.TARGET_NAME, bundled.DRAFT_NAME))
    return Models(
        target=load_model(target, dtype="float32"), draft=load_model(draft, dtype="float32")
    )


Written = tuple[list[int], RecordingObserver]


async def write(
    pair: Models, *, temperature: float, gamma: int, drafter: str = "prompt_lookup"
) -> Written:
    """Code stands in the prompt three times, and the bundled target goes on to repeat itself."""
    tokenizer = AutoTokenizer.from_pretrained(bundled.resolve(bundled.TARGET_NAME))
    params = GenerationParams(
        prompt=tuple(tokenizer.encode(CODE * 3 + CODE[:30])),
        max_tokens=NUM_COPIED,
        sampling=SamplingParams(temperature=temperature),
        seed=5,
        ignore_eos=True,
    )
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
    return stream.token_ids, observer


@pytest.fixture(scope="module")
def plain(pair: Models) -> dict[float, Written]:
    """By temperature, without drafts."""
    return {
        temperature: asyncio.run(write(pair, temperature=temperature, gamma=0))
        for temperature in (0.0, 0.2)
    }


@pytest.mark.parametrize("temperature", [0.0, 0.2])
@pytest.mark.parametrize("drafter", ["prompt_lookup", "prompt_lookup,model"])
async def test_copied_text_is_drafted_by_lookup(
    drafter: str, temperature: float, pair: Models, plain: dict[float, Written]
) -> None:
    expected, in_single_tokens = plain[temperature]
    text, observer = await write(pair, temperature=temperature, gamma=16, drafter=drafter)
    assert text == expected
    assert len(in_single_tokens.records) == NUM_COPIED
    assert len(observer.records) < NUM_COPIED / 3
    outcomes = [outcome for record in observer.records for outcome in record.outcomes]
    by_lookup = [outcome for outcome in outcomes if outcome.source == "prompt_lookup"]
    num_accepted = sum(outcome.num_accepted for outcome in by_lookup)
    assert num_accepted > NUM_COPIED / 3
    assert num_accepted / sum(outcome.num_tested for outcome in by_lookup) > 0.75
