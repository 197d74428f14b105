"""The first layers of a model as a model of their own, which drafts by early exit.

Final norm and head follow layer E in place of the last one. A model that was trained for it says
much the same there, for a fraction of the time (Elhoushi et al., "LayerSkip", 2024,
arXiv:2404.16710). Weights are shared, and so is the cache: keys and values of the first layers are
those of the whole model.
"""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from workers.errors import ConfigError, TandemError
from workers.model import Model
from workers.observation import RECURRENT_LAYER_TYPES, observe_layers


def first_layers(model: Model, num_layers: int) -> Model:
    """The first `num_layers` of a model, with its final norm and head.

    The model itself stays as it is, so that both can run by turns. Raises ConfigError where it has
    no such layers, or they cannot run without the others.
    """
    check_first_layers(model.name, model.module.config, num_layers)
    module = with_first_layers(model.module, num_layers)
    try:
        specs = observe_layers(model.name, module).attention
    except TandemError as error:
        raise ConfigError(
            f"the first {num_layers} layers of {model.name!r} do not run without the others, so "
            f"they cannot draft; use another drafter than early_exit: {error}"
        ) from error
    assert specs == model.layer_specs[: len(specs)], "the first layers differ from themselves"
    return dataclasses.replace(model, module=module, layer_specs=specs, num_first_layers=num_layers)


def check_first_layers(name: str, config: PreTrainedConfig, num_layers: int) -> None:
    """Raise ConfigError unless a model of this configuration has so many layers to draft with."""
    text_config: Any = config.get_text_config()
    if RECURRENT_LAYER_TYPES.intersection(getattr(text_config, "layer_types", None) or ()):
        raise ConfigError(
            f"early_exit_layer is {num_layers}, but {name!r} has recurrent layers, whose states "
            "drafts would change; use another drafter"
        )
    num_all = text_config.num_hidden_layers
    if not 1 <= num_layers < num_all:
        raise ConfigError(
            f"early_exit_layer is {num_layers}, but {name!r} has {num_all} layers; "
            + (f"it must be from 1 to {num_all - 1}" if num_all > 1 else "use another drafter")
        )


def with_first_layers(module: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """A module like this one whose list of layers is shorter; all else it shares.

    Raises ConfigError.
    """
    path = next(_paths_to_layers(module), None)
    if path is None:
        raise ConfigError(
            f"{type(module).__name__} has its layers in no list, so that the first {num_layers} "
            "cannot be told apart; use another drafter than early_exit"
        )
    configs = _shortened_configs(module, num_layers)
    shortened = _copy(module, configs)
    parent: Any = shortened
    *parents, name = path.split(".")
    for child in parents:
        parent._modules[child] = _copy(parent._modules[child], configs)
        parent = parent._modules[child]
    layers: nn.ModuleList = parent._modules[name]
    parent._modules[name] = nn.ModuleList(list(layers)[:num_layers])
    assert isinstance(shortened, PreTrainedModel)
    return shortened


def _paths_to_layers(module: PreTrainedModel) -> Iterator[str]:
    """Where lists of numbered layers are, as long as the model is deep."""
    num_layers = module.config.get_text_config().num_hidden_layers
    for path, child in module.named_modules():
        if isinstance(child, nn.ModuleList) and len(child) == num_layers:
            last = [getattr(part, "layer_idx", None) for part in child[-1].modules()]
            if num_layers - 1 in last:
                yield path


def _shortened_configs(module: PreTrainedModel, num_layers: int) -> dict[int, Any]:
    """Copies of the model's configurations that say so many layers, by the originals' ids."""
    config = copy.deepcopy(module.config)
    text_config: Any = config.get_text_config()
    text_config.num_hidden_layers = num_layers
    if getattr(text_config, "layer_types", None):
        text_config.layer_types = text_config.layer_types[:num_layers]
    return {id(module.config): config, id(module.config.get_text_config()): text_config}


def _copy(module: nn.Module, configs: dict[int, Any]) -> nn.Module:
    """The module with a list of children of its own, which are the same ones."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    config = getattr(module, "config", None)
    if id(config) in configs:
        copied.config = configs[id(config)]
    return copied
