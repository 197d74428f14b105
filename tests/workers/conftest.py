from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.tiny_models import load_reference, save_model
from tests.tokenizers import KINDS, save_permuted, save_speaking_model
from tests.workers.translating import PERMUTED
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


@pytest.fixture(scope="session")
def reference() -> Callable[[Model], PreTrainedModel]:
    """The model that transformers alone runs, in fp32, loaded once; nobody changes it."""
    made: dict[str, PreTrainedModel] = {}

    def load(model: Model) -> PreTrainedModel:
        if model.name not in made:
            made[model.name] = load_reference(model.name)
        return made[model.name]

    return load


@pytest.fixture(scope="session")
def model_names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of models: one for each kind of tokenizer, and "permuted" ones with other ids."""
    folder = tmp_path_factory.mktemp("models")
    names = {
        kind: save_speaking_model(
            folder / kind.replace(" ", "-"), kind, seed, padding=3 * (kind not in PERMUTED)
        )
        for seed, kind in enumerate(KINDS)
    }
    permuted = {
        f"permuted {kind}": save_permuted(names[kind], folder / f"permuted-{kind.split()[0]}")
        for kind in PERMUTED
    }
    return {**names, **permuted}
