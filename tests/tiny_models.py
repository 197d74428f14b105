"""Tiny random models, made on the fly."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.tiny_configs import COMMON, RARE, RECURRENT, SUPPORTED, UNGROUPED, VOCAB_SIZE, WRAPPED

UNSUPPORTED = {
    "falcon": (
        "FalconConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
    ),
    "bloom": (
        "BloomConfig",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    "doge": ("DogeConfig", {**COMMON, "head_dim": 8}),
    "diffllama": ("DiffLlamaConfig", {**COMMON, "head_dim": 8}),
    "recurrent_gemma": ("RecurrentGemmaConfig", {**COMMON, "lru_width": 32}),
    "rwkv": (
        "RwkvConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "attention_hidden_size": 32,
        },
    ),
    "bert": ("BertConfig", {**UNGROUPED}),
}


def make_config(family: str, **changes: object) -> PreTrainedConfig:
    if family in WRAPPED:
        class_name, text, arguments = WRAPPED[family]
        arguments = {**arguments, "text_config": {**text, **changes}}
    else:
        class_name, arguments = {**SUPPORTED, **RARE, **RECURRENT, **UNSUPPORTED}[family]
        arguments = {**arguments, **changes}
    config: PreTrainedConfig = getattr(transformers, class_name)(**arguments)
    return config


def save_model(folder: Path, family: str = "llama", seed: int = 0, **changes: object) -> str:
    """Write a random model; its logits spread enough for arg-maxima to be clear."""
    torch.manual_seed(seed)
    config = make_config(family, **changes)
    model = _auto_class(config).from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # norms, biases and sinks start at one value, which would hide mistakes; matrices start
            # so small that texts would loop
            parameter += torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.1)
    model.save_pretrained(folder)
    return str(folder)


def save_quick_model(folder: Path, seed: int = 0, **changes: object) -> str:
    """Write the random model whose steps take least, for tests of what goes on around a model.

    It has a tokenizer, as transformers would make one up for its family, and an end of texts too.
    """
    name = save_model(
        folder, "opt", seed, num_hidden_layers=2, tie_word_embeddings=False, **changes
    )
    save_tokenizer(folder, [f"w{index}" for index in range(VOCAB_SIZE)])
    return name


def load_reference(name: str) -> PreTrainedModel:
    """A model as transformers alone runs it, in fp32."""
    config = AutoConfig.from_pretrained(name)
    model: PreTrainedModel = _auto_class(config).from_pretrained(name, dtype=torch.float32).eval()
    return model


def _auto_class(config: PreTrainedConfig) -> Any:
    is_wrapper = config.get_text_config() is not config
    return AutoModelForImageTextToText if is_wrapper else AutoModelForCausalLM


def save_tokenizer(folder: Path, words: Sequence[str], **special_tokens: str) -> None:
    """Write a tokenizer of whole words, the first of which stands for unknown ones too."""
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens).save_pretrained(folder)


def edit_json(path: Path, **changes: Any) -> None:
    """Change some entries of a JSON file; None removes one."""
    content = json.loads(path.read_text()) if path.exists() else {}
    content |= changes
    kept = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(kept))
