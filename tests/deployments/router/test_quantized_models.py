"""A target and a draft that are quantized apart, through the round loop: drafts change no text."""

import pytest

from tests.deployments.loops import (
    GREEDY,
    SAMPLED,
    Models,
    make_params,
    model_drafts,
    run_all,
    running_loop,
)
from tests.tiny_models import save_model
from workers.model import load_model
from workers.quantization import PACKAGES_OF, is_installed
from workers.types import Rule

pytestmark = pytest.mark.skipif(
    not all(map(is_installed, PACKAGES_OF.values())), reason="needs torchao and bitsandbytes"
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """One model twice, whose inputs are whole blocks of 4 bits."""
    wide = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    name = save_model(tmp_path_factory.mktemp("wide"), "qwen2", **wide)
    return Models(
        target=load_model(name, dtype="float32", device="cpu", quantization="int8"),
        draft=load_model(name, dtype="float32", device="cpu", quantization="bnb_nf4"),
    )


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
async def test_texts_are_those_of_plain_decoding(rule: Rule, pair: Models) -> None:
    """Drawn ones too, under the rule that promises it."""
    sampling = SAMPLED if rule == "coupled" else GREEDY
    params = [make_params(seed, sampling=sampling, verification=rule) for seed in range(12)]
    async with running_loop(pair, gamma=0) as (loop, _, _):
        plain = await run_all(loop, params, concurrency=1)
    async with running_loop(pair, drafts=model_drafts(pair)) as (loop, _, observer):
        drafted = await run_all(loop, params, concurrency=12)
    assert [stream.token_ids for stream in drafted] == [stream.token_ids for stream in plain]
    outcomes = [outcome for record in observer.records for outcome in record.outcomes]
    assert sum(outcome.num_accepted for outcome in outcomes) > 0
