"""Apps with other drafters, each in place of the one before."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster import bundled
from tests.integration.conftest import Deploy, served_tokens
from tests.integration.mixed import OPTIONS, check_that_drafts_change_nothing
from workers.model import load_config


@pytest.mark.parametrize(("gamma", "concurrency"), [(0, 16), (1, 16), (8, 16), (4, 1), (4, 16)])
async def test_a_random_drafter_changes_nothing(
    gamma: int,
    concurrency: int,
    deploy: Deploy,
    prompts: list[str],
    sampled_tokens: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.getbasetemp() / "random-draft"
    if not folder.exists():  # of the bundled draft's shape, which is compiled already
        torch.manual_seed(0)
        config = load_config(bundled.resolve(bundled.DRAFT_NAME))
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    served = deploy(draft=str(folder))
    await served.set_gamma(gamma)
    num_prompts = 4 if concurrency == 1 else 16
    tokens = await served_tokens(served, prompts[:num_prompts], concurrency=concurrency)
    assert tokens == sampled_tokens[:num_prompts]


async def test_every_way_to_draft_in_one_batch_changes_nothing(
    deploy: Deploy, prompts: list[str]
) -> None:
    served = deploy(**OPTIONS)
    await served.set_gamma(8)
    await check_that_drafts_change_nothing(served, prompts)


async def test_plain_decoding_is_an_app_without_drafters(
    deploy: Deploy, prompts: list[str], sampled_tokens: list[list[int]]
) -> None:
    served = deploy(drafter="none")
    assert await served_tokens(served, prompts[:8], concurrency=8) == sampled_tokens[:8]
