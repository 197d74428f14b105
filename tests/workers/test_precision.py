"""In which precision checkpoints are taken, and what is said where texts may depend on more."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_configs import VOCAB_SIZE
from tests.tiny_models import make_config, save_model
from tests.workers.decoding import CACHE, GREEDY, SAMPLED, Drafts, generate, make_prompt
from workers.cpu.packed_linear import has_streams
from workers.model import load_model
from workers.target import Target


def save_float16(folder: Path, *, with_dtype: bool) -> str:
    name = save_model(folder)
    model = AutoModelForCausalLM.from_pretrained(name).half()
    model.save_pretrained(folder)
    if not with_dtype:
        config = json.loads((folder / "config.json").read_text())
        assert config.pop("dtype") == "float16"
        (folder / "config.json").write_text(json.dumps(config))
    return name


@pytest.mark.parametrize("with_dtype", [True, False], ids=["named", "unnamed"])
def test_a_cpu_takes_a_float16_checkpoint_as_float32(with_dtype: bool, tmp_path: Path) -> None:
    """It is in every number the same."""
    name = save_float16(tmp_path, with_dtype=with_dtype)
    model = load_model(name, device="cpu")
    assert model.dtype == torch.float32
    assert {p.dtype for p in model.module.parameters()} == {torch.float32}
    assert model.slot_bytes == 2 * load_model(name, dtype="float16", device="cpu").slot_bytes
    own = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float16)
    ours = model.module.get_input_embeddings().weight
    assert torch.equal(ours, own.get_input_embeddings().weight.float())
    assert model.text_warnings == ()


def unlike_drafts(seed: int) -> Drafts:
    rng = random.Random(seed)

    def draft(_: str, tokens: Sequence[int]) -> list[int]:
        return rng.choices(range(VOCAB_SIZE), k=len(tokens) % 7)

    return draft


@pytest.mark.skipif(not has_streams(torch.float32), reason="needs products of our own")
def test_texts_of_a_float16_checkpoint_do_not_depend_on_drafts(tmp_path: Path) -> None:
    target = Target(load_model(save_float16(tmp_path, with_dtype=True), device="cpu"), CACHE)
    for seed in range(3):
        for sampling in (GREEDY, SAMPLED):
            prompt = make_prompt(seed, 10 + 9 * seed)
            plain = generate(target, prompt, 30, sampling=sampling)
            drafted = generate(target, prompt, 30, sampling=sampling, drafts=unlike_drafts(seed))
            assert drafted == plain


def test_float16_that_was_asked_for_is_warned_of(tmp_path: Path) -> None:
    model = load_model(save_model(tmp_path), dtype="float16", device="cpu")
    (warning,) = model.text_warnings
    assert "runs in float16" in warning
    assert "a text may depend on drafts" in warning
    assert "dtype=float32 rules that out" in warning
    assert Target(model, CACHE).warnings == model.text_warnings


@pytest.mark.skipif(not has_streams(torch.bfloat16), reason="needs products of our own")
@pytest.mark.parametrize(
    ("family", "is_warned_of"), [("llama", False), ("gemma2", False), ("gpt2", True)]
)
def test_bfloat16_is_warned_of_where_other_products_are_left(
    family: str, is_warned_of: bool, tmp_path: Path
) -> None:
    """GPT-2 has no linear layers, but its own kind of them."""
    name = save_model(tmp_path, family)
    model = load_model(name, dtype="bfloat16", device="cpu")
    assert bool(model.text_warnings) is is_warned_of
    assert load_model(name, dtype="float32", device="cpu").text_warnings == ()


def test_a_dtype_that_config_names_is_kept(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(make_config("llama")).bfloat16().save_pretrained(tmp_path)
    assert load_model(str(tmp_path), device="cpu").dtype == torch.bfloat16
