"""The first layers of a target as a model of their own."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaModel

from tests.tiny_configs import RARE, RECURRENT, SUPPORTED, WRAPPED
from tests.tiny_models import make_config, save_model
from tests.workers.decoding import CACHE, GREEDY, generate, make_prompt
from tests.workers.writer import Writer
from workers.errors import ConfigError
from workers.first_layers import check_first_layers, first_layers
from workers.model import Model, load_model
from workers.target import Target

LoadModel = Callable[..., Model]
ALIKE = ("qwen2", "phi3", "olmo2", "cohere", "granite", "starcoder2", "olmoe", "phimoe")
"""Families whose layers are one list in one place as llama's and mixtral's, and of one kind."""


@pytest.mark.parametrize(
    "family", [name for name in (*SUPPORTED, *RARE, *WRAPPED) if name not in ALIKE]
)
def test_they_are_a_model_of_so_many_layers(
    family: str,
    tiny_model: LoadModel,
    reference: Callable[[Model], PreTrainedModel],
) -> None:
    compare_with_transformers(tiny_model(family), reference, family)


def test_so_they_are_where_layers_are_alike(
    has_all_combinations: bool,
    tiny_model: LoadModel,
    reference: Callable[[Model], PreTrainedModel],
) -> None:
    """All such families, or a dense one and one of experts."""
    for family in ALIKE if has_all_combinations else ("phi3", "olmoe"):
        compare_with_transformers(tiny_model(family), reference, family)


def compare_with_transformers(
    model: Model, reference: Callable[[Model], PreTrainedModel], family: str
) -> None:
    """The logits are what transformers makes of the same weights with so few layers."""
    shallow_config = make_config(family)
    text_config: Any = shallow_config.get_text_config()
    text_config.num_hidden_layers = num_layers = text_config.num_hidden_layers - 1
    if getattr(text_config, "layer_types", None):
        text_config.layer_types = text_config.layer_types[:-1]
    whole: Any = reference(model)
    shallow = type(whole)(shallow_config).eval()
    shallow.load_state_dict(whole.state_dict(), strict=False)
    prompt = make_prompt(3, 15)
    target = Target(model, CACHE, early_exit_layer=num_layers)
    writer = Writer(target, prompt, next_k=3, options={"sampling": GREEDY})
    drafts = writer.round().next_drafts
    text = writer.tokens[:]
    for draft in drafts.tokens:
        logits = shallow(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
        assert draft == int(logits.argmax())
        text.append(draft)
    assert len(drafts.tokens) == 3
    assert generate(target, prompt, 2) == generate(Target(model, CACHE), prompt, 2)


def test_the_model_stays_as_it_was(tiny_model: LoadModel) -> None:
    model = tiny_model("gemma2")
    config = copy.deepcopy(model.module.config.to_dict())
    early = first_layers(model, 1)
    assert model.module.config.to_dict() == config
    assert early.module.config.num_hidden_layers == 1
    assert (len(model.module.model.layers), len(early.module.model.layers)) == (3, 1)
    assert early.module.model.layers[0] is model.module.model.layers[0]
    assert early.slot_bytes * 3 == model.slot_bytes


@pytest.mark.parametrize("layer", [0, 3, 9, -1])
def test_there_have_to_be_so_many_and_more(layer: int, tiny_model: LoadModel) -> None:
    model = tiny_model()
    with pytest.raises(ConfigError) as caught:
        Target(model, CACHE, early_exit_layer=layer)
    sentence = f"early_exit_layer is {layer}, but {model.name!r} has 3 layers; it must be from "
    assert str(caught.value) == f"{sentence}1 to 2"


@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_layers_do_not_draft(family: str) -> None:
    with pytest.raises(ConfigError, match=r"early_exit_layer is 2, but 'x' has recurrent lay"):
        check_first_layers("x", make_config(family), 2)


def test_layers_that_do_not_run_without_the_others_do_not_draft(
    tiny_model: LoadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LlamaModel.forward

    def run_and_look_at_the_last(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.layers[2] is not None
        return run(*args, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", run_and_look_at_the_last)
    model = tiny_model()
    sentence = (
        rf"the first 2 layers of '{model.name}' do not run without the others, so they cannot "
        "draft; use another drafter than early_exit: .*IndexError"
    )
    with pytest.raises(ConfigError, match=sentence):
        Target(model, CACHE, early_exit_layer=2)


def test_layers_that_are_in_no_list_do_not_draft(tmp_path: Path) -> None:
    model = load_model(save_model(tmp_path), device="cpu")
    model.module.model.layers = torch.nn.Sequential(*model.module.model.layers)
    sentence = (
        "LlamaForCausalLM has its layers in no list, so that the first 1 cannot be told apart; "
        "use another drafter than early_exit"
    )
    with pytest.raises(ConfigError, match=sentence):
        Target(model, CACHE, early_exit_layer=1)


def test_a_target_without_early_exit_makes_no_drafts(tiny_model: LoadModel) -> None:
    request = Writer(Target(tiny_model(), CACHE), make_prompt(1, 5)).request()
    (result,) = Target(tiny_model(), CACHE).verify([request])
    assert result.error == "next_k is 4, but this target makes no drafts; it must be 0"
