"""Growing a trained Llama without changing its function.

A benchmark needs a target of realistic size whose text a small draft can still guess, and nothing
of that kind can be trained here. So a small trained model is embedded in a large one:

- wider: new channels of the residual stream are never written, so they stay zero. RMSNorm divides
  by the mean over all H channels instead of h, which sqrt(h / H) on its weights and h / H on its
  epsilon undo. New heads and new channels of the MLP feed into zero rows of the output projections.
- deeper: new layers have zero output projections (attention's and the MLP's), so they add zero to
  the stream.

All other new weights are random, so that the large model computes and moves as much as any model
of its size. Grown by a factor that is a power of four, the norms' scale is a power of two and the
weights stay exact in bf16.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cluster import bundled
from workers.errors import ConfigError

logger = logging.getLogger(__name__)

# Sums of squares of zeros leave the stream as it is; what is random only has to look like weights.
RANDOM_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class GrownSize:
    """The size to grow a model to. The default makes 287M parameters of the bundled 4M target."""

    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_layers: int = 24


def grow_to_folder(source: str, output: Path, size: GrownSize, *, seed: int = 0) -> int:
    """Grow a model folder into another, in the source's precision; returns its parameter count.

    Raises ConfigError if the sizes do not allow it.
    """
    model = LlamaForCausalLM.from_pretrained(source, dtype="auto")
    grown = grow(model, size, seed=seed)
    grown.save_pretrained(output)
    AutoTokenizer.from_pretrained(source).save_pretrained(output)
    return int(grown.num_parameters())


def grown_target(folder: Path) -> str:
    """The bundled target grown to the default size, made below `folder` unless it is there."""
    output = folder / "grown-target"
    if not (output / "config.json").exists():
        num_parameters = grow_to_folder(bundled.resolve(bundled.TARGET_NAME), output, GrownSize())
        logger.info("grew the bundled target to %.0fM parameters", num_parameters / 1e6)
    return str(output)


@torch.no_grad()
def grow(model: LlamaForCausalLM, size: GrownSize, *, seed: int = 0) -> LlamaForCausalLM:
    """A model of the given size with the same function, dtype and device; raises ConfigError."""
    config = _grown_config(model.config, size)
    with torch.device(model.device):
        grown: LlamaForCausalLM = LlamaForCausalLM._from_config(config, dtype=model.dtype)
    torch.manual_seed(seed)
    for parameter in grown.parameters():
        parameter.normal_(std=RANDOM_STD)
    _grow_ends(model, grown)
    layers = _spread(model.config.num_hidden_layers, size.num_layers)
    norm_scale = (model.config.hidden_size / size.hidden_size) ** 0.5
    for index, grown_layer in enumerate(grown.model.layers):
        attention, mlp = grown_layer.self_attn, grown_layer.mlp
        attention.o_proj.weight.zero_()
        mlp.down_proj.weight.zero_()
        if index not in layers:
            continue
        layer = model.model.layers[layers[index]]
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            _embed(getattr(layer.self_attn, name).weight, getattr(attention, name).weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            _embed(getattr(layer.mlp, name).weight, getattr(mlp, name).weight)
        for name in ("input_layernorm", "post_attention_layernorm"):
            _embed(getattr(layer, name).weight * norm_scale, getattr(grown_layer, name).weight)
    grown.train(mode=False)
    return grown


def _grow_ends(model: LlamaForCausalLM, grown: LlamaForCausalLM) -> None:
    """Embeddings, final norm and head. The new channels of the stream start as zero."""
    norm_scale = (model.config.hidden_size / grown.config.hidden_size) ** 0.5
    embeddings = grown.model.embed_tokens.weight
    embeddings.zero_()
    _embed(model.model.embed_tokens.weight, embeddings)
    _embed(model.model.norm.weight * norm_scale, grown.model.norm.weight)
    if not grown.config.tie_word_embeddings:
        _embed(model.lm_head.weight, grown.lm_head.weight)


def _embed(small: Tensor, large: Tensor) -> None:
    """Put `small` into the corner of `large`. Columns beside it meet channels that are zero; rows
    below it make new heads and MLP channels, which the output projections' zero columns ignore."""
    large[tuple(slice(0, length) for length in small.shape)] = small


def _spread(num_layers: int, num_grown: int) -> dict[int, int]:
    """Where the trained layers go among the grown ones: evenly, in order."""
    return {index * num_grown // num_layers: index for index in range(num_layers)}


def _grown_config(config: LlamaConfig, size: GrownSize) -> LlamaConfig:
    factor, rest = divmod(size.hidden_size, config.hidden_size)
    if rest or factor < 1:
        raise ConfigError(
            f"hidden_size {size.hidden_size} is no multiple of the source's {config.hidden_size}"
        )
    if size.intermediate_size < config.intermediate_size:
        raise ConfigError(
            f"intermediate_size {size.intermediate_size} is less than the source's "
            f"{config.intermediate_size}"
        )
    if size.num_layers < config.num_hidden_layers:
        raise ConfigError(
            f"num_layers {size.num_layers} is less than the source's {config.num_hidden_layers}"
        )
    grown: LlamaConfig = LlamaConfig.from_dict(config.to_dict())
    grown.hidden_size = size.hidden_size
    grown.intermediate_size = size.intermediate_size
    grown.num_hidden_layers = size.num_layers
    # the same queries per key head, so that old heads keep their old partners
    grown.num_attention_heads = config.num_attention_heads * factor
    grown.num_key_value_heads = (config.num_key_value_heads or config.num_attention_heads) * factor
    grown.head_dim = config.hidden_size // config.num_attention_heads
    grown.rms_norm_eps = config.rms_norm_eps * config.hidden_size / size.hidden_size
    return grown
