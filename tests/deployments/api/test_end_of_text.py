"""A token that any of a model's files calls its end ends a text, wherever drafts put it."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from deployments.router.sequence import FinishReason
from tests.deployments.loops import (
    CACHE,
    GREEDY,
    Models,
    Stream,
    make_params,
    run_all,
    running_loop,
)
from tests.fakes import LocalWorkers
from tests.tiny_configs import VOCAB_SIZE
from tests.tiny_models import edit_json, save_tokenizer
from workers.drafters.model import ModelDrafter
from workers.model import load_model

NUM_TOKENS = 16
WORDS = [f"w{index}" for index in range(VOCAB_SIZE)]
OLD_END = 2


def declare(folder: Path, place: str, token: int) -> None:
    """Leave the token as the end of texts in one of the three places only."""
    edit_json(folder / "generation_config.json", eos_token_id=None)
    edit_json(folder / "config.json", eos_token_id=None)
    if place == "tokenizer":
        save_tokenizer(folder, WORDS, eos_token=WORDS[token])
    else:
        edit_json(folder / place, eos_token_id=[OLD_END, token])


@pytest.mark.parametrize("place", ["generation_config.json", "config.json", "tokenizer"])
async def test_a_produced_token_declared_as_the_end_ends_the_text(
    place: str, models: Models, tmp_path: Path
) -> None:
    params = make_params(3, sampling=GREEDY, max_tokens=NUM_TOKENS)
    async with running_loop(models, gamma=0) as (loop, _, _):
        (plain,) = await run_all(loop, [params], concurrency=1)
    for position in range(2, 13, 3):
        end = plain.token_ids[position]
        first = plain.token_ids.index(end)
        folder = tmp_path / str(position)
        shutil.copytree(models.target.name, folder)
        declare(folder, place, end)
        declared = load_model(str(folder), dtype="float32", device="cpu")
        assert end in declared.eos_token_ids
        for gamma in (8, 1, 0):
            pair = dataclasses.replace(models, target=declared)
            drafts = LocalWorkers(lambda: ModelDrafter(models.draft, CACHE))
            async with running_loop(pair, gamma=gamma, drafts=drafts) as (loop, _, _):
                stream = Stream(params, eos_token_ids=declared.eos_token_ids)
                loop.add(stream.sequence)
                await stream.sequence.done.wait()
            assert stream.token_ids == plain.token_ids[: first + 1]
            assert stream.deltas[-1].finish_reason is FinishReason.STOP
