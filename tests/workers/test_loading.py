"""Weights that do not fit the model, or that transformers would misread, are told by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    PreTrainedModel,
    Qwen2AudioConfig,
    T5Config,
)

from tests.tiny_models import edit_json, save_model
from tests.workers.decoding import CACHE, generate, make_prompt
from workers.errors import (
    ConfigError,
    DamagedModelError,
    TandemError,
    UnsupportedModelError,
    first_line,
)
from workers.loading import ignored_keys
from workers.model import load_config, load_model
from workers.target import Target

FP8_MAX = 448.0
BLOCK = 128


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def save_fp8(folder: Path) -> str:
    """A checkpoint of block-wise fp8, as DeepSeek's, in blocks that are larger than its layers."""

    def quantize(weights: dict[str, Tensor]) -> None:
        weights.update({key: weight.bfloat16() for key, weight in weights.items()})
        for key in [key for key in weights if key.endswith("proj.weight")]:
            scale = weights[key].abs().max().float() / FP8_MAX
            weights[key] = (weights[key] / scale).to(torch.float8_e4m3fn)
            weights[f"{key}_scale_inv"] = scale.reshape(1, 1)

    name = save_model(folder)
    edit_weights(folder, quantize)
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head"],
    }
    edit_json(folder / "config.json", quantization_config=quantization, dtype="bfloat16")
    return name


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the weights stay quantized")
def test_fp8_blocks_are_served_as_transformers_reads_them(tmp_path: Path) -> None:
    name = save_fp8(tmp_path)
    model = load_model(name, device="cpu")
    assert model.dtype == torch.bfloat16
    reference: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    prompt = make_prompt(3, 12)
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt]), use_cache=False).logits[0, -1]
    (token,) = generate(Target(model, CACHE), prompt, 1)
    assert logits[token] >= logits.max() - 0.05 * logits.std()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_fp8_in_another_dtype_says_which_it_may_be(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"dtype is '{dtype}'.*\(fp8\).*use dtype=auto"):
        load_model(save_fp8(tmp_path), dtype=dtype, device="cpu")


@pytest.mark.parametrize(
    "extra", ["weight_scale", "input_scale", "bias", "qzeros"], ids=lambda extra: extra
)
def test_what_a_layer_would_be_loaded_without_is_named(extra: str, tmp_path: Path) -> None:
    name = save_model(tmp_path)
    key = f"model.layers.1.self_attn.q_proj.{extra}"
    edit_weights(tmp_path, lambda weights: weights.update({key: torch.ones(32)}))
    with pytest.raises(UnsupportedModelError, match=f"more than transformers reads.*{key}"):
        load_model(name, device="cpu")


def test_parts_that_the_model_lacks_change_nothing(tmp_path: Path) -> None:
    name = save_model(tmp_path)
    extra = [
        "model.layers.3.self_attn.q_proj.weight",  # of a layer for more than one next token
        "model.layers.3.self_attn.q_proj.weight_scale_inv",
        "mtp.layers.0.embed_tokens.weight",
        "vision_tower.blocks.0.attn.qkv.bias",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    ]
    edit_weights(tmp_path, lambda w: w.update({key: torch.ones(4) for key in extra}))
    assert load_model(name, device="cpu").vocab_size == 97


def test_only_layers_with_weights_of_their_own_count() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    parts_too = nn.Module()
    parts_too.register_parameter("embedding", nn.Parameter(torch.ones(1)))
    parts_too.add_module("layer", nn.Linear(2, 2))
    module.add_module("model", parts_too)
    ours = {"0.scale", "1.0.scale", "0.lora_A.default.weight", "model.layer.scale"}
    others = {"1.k_scale", "2.scale", "scale", "model.vision.patches.weight"}
    assert ignored_keys(module, ours | others) == sorted(ours)


def test_scales_of_experts_that_are_one_weight_here_are_named(tmp_path: Path) -> None:
    name = save_model(tmp_path, "qwen2_moe")
    key = "model.layers.0.mlp.experts.3.up_proj.weight_scale"
    edit_weights(tmp_path, lambda weights: weights.update({key: torch.ones(1)}))
    with pytest.raises(UnsupportedModelError, match="more than transformers reads"):
        load_model(name, device="cpu")


def test_a_missing_layer_is_no_missing_head(tmp_path: Path) -> None:
    name = save_model(tmp_path)
    lost = "model.layers.1.mlp.up_proj.weight"
    edit_weights(tmp_path, lambda weights: weights.pop(lost))
    with pytest.raises(DamagedModelError, match=f"incomplete.*lacks 1 .*{lost}") as caught:
        load_model(name, device="cpu")
    assert "causal language model" not in str(caught.value)


def test_shapes_that_do_not_fit_are_named(tmp_path: Path) -> None:
    name = save_model(tmp_path)
    edit_json(tmp_path / "config.json", intermediate_size=48)
    match = r"'model.layers.0.mlp.down_proj.weight' has the shape \[32, 64\] .* and \[32, 48\]"
    with pytest.raises(UnsupportedModelError, match=match):
        load_model(name, device="cpu")


def test_an_unknown_rope_is_named(tmp_path: Path) -> None:
    name = save_model(tmp_path)
    rope = {"rope_type": "newrope", "rope_theta": 10000.0, "factor": 2.0}
    edit_json(tmp_path / "config.json", rope_parameters=rope)
    with pytest.raises(
        UnsupportedModelError, match=r"rope_type 'newrope'.*it knows default, linear"
    ):
        load_model(name, device="cpu")


def test_a_bad_field_of_the_config_is_named(tmp_path: Path) -> None:
    name = save_model(tmp_path)
    edit_json(tmp_path / "config.json", vocab_size="many")
    with pytest.raises(UnsupportedModelError, match=r"no usable config.json.*vocab_size") as caught:
        load_model(name, device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            Qwen2AudioConfig(
                text_config={"model_type": "qwen2", "hidden_size": 32, "vocab_size": 97},
                audio_config={"model_type": "qwen2_audio_encoder"},
            ),
            "inside a multimodal wrapper that transformers does not list",
        ),
        (T5Config(d_model=16, num_layers=1), "an encoder-decoder, no causal language model"),
    ],
    ids=["wrapper", "encoder-decoder"],
)
def test_kinds_of_models_that_are_not_served_are_named(
    config: Any, reason: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    save_file({"weight": torch.ones(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(str(tmp_path), device="cpu")


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="bert"):
        load_model(str(tmp_path), device="cpu")


@pytest.mark.parametrize(
    ("raised", "told", "words"),
    [
        (ZeroDivisionError("by zero"), UnsupportedModelError, "ZeroDivisionError"),
        (AssertionError(), UnsupportedModelError, "AssertionError"),
        (ImportError("x"), UnsupportedModelError, "ImportError"),
        # no fault of the model
        (MemoryError(), ConfigError, "does not fit into the memory"),
        (torch.OutOfMemoryError("of 80 GiB"), ConfigError, "does not fit into the memory"),
    ],
)
def test_whatever_loading_raises_is_an_error_of_ours(
    raised: Exception,
    told: type[TandemError],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> PreTrainedModel:
        raise raised

    name = save_model(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(told, match=words) as caught:
        load_model(name, device="cpu")
    assert caught.type is told


def test_broken_weights_of_torch_are_told(tmp_path: Path) -> None:
    name = save_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02 not a pickle")
    with pytest.raises(UnsupportedModelError, match="cannot be loaded"):
        load_model(name, device="cpu")


def test_code_is_never_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Transformers would ask on the terminal whether to run it."""
    save_model(tmp_path)
    edit_json(
        tmp_path / "config.json", model_type="other", auto_map={"AutoConfig": "other.OtherConfig"}
    )
    with pytest.raises(UnsupportedModelError, match="its own code"):
        load_config(str(tmp_path))
    assert "[y/N]" not in capsys.readouterr().out


def test_first_lines_that_end_in_a_colon_are_joined_to_the_next() -> None:
    assert first_line(ValueError("bad field 'x':\n\n   not a number\nmore")) == (
        "bad field 'x': not a number"
    )
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError()) == ""
