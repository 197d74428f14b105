"""Step loops over a tiny target."""

import time
from collections.abc import AsyncIterator, Callable

import pytest

from deployments.replicas.step_loop import StepLoop
from tests.deployments.replicas.step_loops import Loop
from tests.tiny_models import save_quick_model
from workers.model import Model, load_model
from workers.paged_model import CacheOptions
from workers.target import Target


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    name = save_quick_model(tmp_path_factory.mktemp("model"))
    return load_model(name, dtype="float32", device="cpu")


@pytest.fixture
async def start_loop(model: Model) -> AsyncIterator[Callable[..., Loop]]:
    loops: list[Loop] = []

    def start(clock: Callable[[], float] = time.monotonic) -> Loop:
        cache = CacheOptions(block_size=4, max_num_seqs=16)
        loop: Loop = StepLoop(
            lambda: Target(model, cache, max_batched_tokens=16),
            idle_timeout_s=100,
            clock=clock,
        )
        loops.append(loop)
        return loop

    yield start
    for loop in loops:
        await loop.close()
