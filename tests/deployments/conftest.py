import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
import torch

from deployments.router.sequence import GenerationParams
from tests.deployments.loops import GREEDY, Models, make_params, run_all, running_loop
from tests.deployments.serving import LocalServing, client_of, local_serving
from tests.tiny_models import save_quick_model


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models.load(save_quick_model(tmp_path_factory.mktemp("pair")))


@pytest.fixture(scope="session")
def all_params() -> list[GenerationParams]:
    return [make_params(seed) for seed in range(9)] + [
        make_params(seed, sampling=GREEDY) for seed in range(9, 12)
    ]


@pytest.fixture(scope="session")
def plain(models: Models, all_params: list[GenerationParams]) -> list[list[int]]:
    """Each sequence alone, without drafts."""

    async def run() -> list[list[int]]:
        async with running_loop(models, gamma=0) as (loop, _, _):
            streams = await run_all(loop, all_params, concurrency=1)
            return [stream.token_ids for stream in streams]

    return asyncio.run(run())


@pytest.fixture
async def serving(models: Models) -> AsyncIterator[LocalServing]:
    async with local_serving(models.target) as serving:
        yield serving


@pytest.fixture
async def client(serving: LocalServing) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(serving) as client:
        yield client
