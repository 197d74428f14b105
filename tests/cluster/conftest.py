"""Large models to plan with."""

from collections.abc import Iterator
from functools import cache

import pytest
from transformers import LlamaConfig

from cluster.plan.model_size import size_draft, size_model

# Of few layers, which are quickly built.
LLAMA_70B = {
    "vocab_size": 128256,
    "hidden_size": 24576,
    "intermediate_size": 86016,
    "num_hidden_layers": 8,
    "num_attention_heads": 96,
    "num_key_value_heads": 32,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
LLAMA_1B = {
    **LLAMA_70B,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def _sizes_once() -> Iterator[None]:
    """The share of a rank is computed once for all plans of a file, since that takes longest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cluster.plan.planning.size_model", cache(size_model))
        patch.setattr("cluster.plan.planning.size_draft", cache(size_draft))
        yield


@pytest.fixture(scope="module")
def llamas(_sizes_once: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """A target of 70B parameters and a draft of 1B, of which there are config.json only."""
    folder = tmp_path_factory.mktemp("llamas")
    LlamaConfig(**LLAMA_70B).save_pretrained(folder / "70b")
    LlamaConfig(**LLAMA_1B).save_pretrained(folder / "1b")
    return {"target": str(folder / "70b"), "draft": str(folder / "1b")}
