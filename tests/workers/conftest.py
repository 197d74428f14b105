from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tiny_models import save_model
from workers.model import Model, load_model


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """Load a tiny random model in fp32, made once per set of arguments."""
    made: dict[object, Model] = {}

    def load(family: str = "llama", seed: int = 0, **changes: object) -> Model:
        key = (family, seed, tuple(sorted(changes.items())))
        if key not in made:
            folder: Path = tmp_path_factory.mktemp(family)
            name = save_model(folder, family, seed, **changes)
            made[key] = load_model(name, dtype="float32", device="cpu")
        return made[key]

    return load
