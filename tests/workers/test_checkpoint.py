"""A folder that cannot be served is refused by what its files say, in one sentence."""

import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import load_file, save_file

from tests.tiny_models import edit_json, save_model
from workers import checkpoint, quantization
from workers.checkpoint import check_checkpoint
from workers.errors import ConfigError, DamagedModelError, ModelNotFoundError, UnsupportedModelError
from workers.model import load_model
from workers.model_source import AnyModel, ModelSource

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4000000000\n"


def keep_only(folder: Path, *names: str) -> None:
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def become_gguf(folder: Path) -> None:
    keep_only(folder)
    (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF")


def become_adapter(folder: Path) -> None:
    keep_only(folder)
    edit_json(folder / "adapter_config.json", peft_type="LORA")


def lose_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    shards = {"lm_head.weight": "model-00001-of-00002.safetensors"}
    edit_json(folder / "model.safetensors.index.json", weight_map=shards)


def rename_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")


def cast_to_fp8(folder: Path) -> None:
    """As ModelOpt leaves a checkpoint: scaled fp8 weights, each with its scale beside it."""
    import torch

    weights = load_file(folder / "model.safetensors")
    for key in [key for key in weights if key.endswith("proj.weight")]:
        scale = weights[key].abs().max() / 448
        weights[key] = (weights[key] / scale).to(torch.float8_e4m3fn)
        weights[f"{key}_scale"] = scale
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def quantize_by_modelopt(folder: Path) -> None:
    cast_to_fp8(folder)
    edit_json(folder / "hf_quant_config.json", quantization={"quant_algo": "FP8"})


def quantize_by(method: str | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        edit_json(folder / "config.json", quantization_config={"quant_method": method, "bits": 4})

    return change


def quantize_by_mlx(folder: Path) -> None:
    edit_json(folder / "config.json", quantization={"group_size": 64, "bits": 4})


FAULTS: dict[str, tuple[Callable[[Path], object], type[ConfigError], str]] = {
    "git-lfs weights": (
        lambda folder: (folder / "model.safetensors").write_text(LFS_POINTER),
        DamagedModelError,
        "model.safetensors is a Git-LFS pointer.*`git lfs pull`",
    ),
    "git-lfs tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text(LFS_POINTER),
        DamagedModelError,
        "tokenizer.json is a Git-LFS pointer",
    ),
    "git-lfs config": (
        lambda folder: (folder / "config.json").write_text(LFS_POINTER),
        DamagedModelError,
        "config.json is a Git-LFS pointer",
    ),
    "empty weights": (
        lambda folder: cut(folder / "model.safetensors", 0),
        DamagedModelError,
        "model.safetensors is empty; get it again",
    ),
    "weights cut in the header": (
        lambda folder: cut(folder / "model.safetensors", 100),
        DamagedModelError,
        "damaged.*after 100 bytes, in the middle of its header",
    ),
    "weights cut in the data": (
        lambda folder: cut(folder / "model.safetensors", 30_000),
        DamagedModelError,
        r"damaged.*has 30000 bytes instead of \d+",
    ),
    "weights that are none": (
        lambda folder: (folder / "model.safetensors").write_text("<html>Not found</html>"),
        DamagedModelError,
        "no safetensors file",
    ),
    "a broken header": (
        lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"{{{{"),
        DamagedModelError,
        "its header is no safetensors header",
    ),
    "no weights": (
        lambda folder: keep_only(folder, "config.json"),
        ModelNotFoundError,
        "has a config.json but no weights",
    ),
    "weights by another name": (rename_weights, ModelNotFoundError, "'consolidated.safetensors'"),
    "a missing shard": (
        lose_a_shard,
        DamagedModelError,
        "incomplete: 'model-00001-of-00002.safetensors'",
    ),
    "nothing": (lambda folder: keep_only(folder), ModelNotFoundError, "has no config.json"),
    "only GGUF": (become_gguf, UnsupportedModelError, "GGUF files only"),
    "a LoRA adapter": (become_adapter, UnsupportedModelError, "LoRA adapter.*merge it"),
    "bad JSON": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "llama",'),
        DamagedModelError,
        "config.json is no valid JSON",
    ),
    "no JSON object": (
        lambda folder: (folder / "config.json").write_text("[]"),
        DamagedModelError,
        "config.json is no JSON object",
    ),
    "no model type": (
        lambda folder: (folder / "config.json").write_text('{"hidden_size": 8}'),
        UnsupportedModelError,
        "names no model_type",
    ),
    "a model type of tomorrow": (
        lambda folder: edit_json(folder / "config.json", model_type="llama99"),
        UnsupportedModelError,
        "model_type 'llama99'.*newer transformers",
    ),
    "its own code": (
        lambda folder: edit_json(
            folder / "config.json", model_type="mymodel", auto_map={"AutoConfig": "my.MyConfig"}
        ),
        UnsupportedModelError,
        "brings its own code, which is not run unless you trust it.*trust_remote_code=true",
    ),
    "fp8 that nothing declares": (cast_to_fp8, UnsupportedModelError, "is F8_E4M3.*misread"),
    "ModelOpt's own file": (quantize_by_modelopt, UnsupportedModelError, "'modelopt'"),
    "ModelOpt": (quantize_by("modelopt"), UnsupportedModelError, "'modelopt'.*unquantized"),
    "exl2": (quantize_by("exl2"), UnsupportedModelError, "quantized with 'exl2'"),
    "MLX": (quantize_by_mlx, UnsupportedModelError, "a method it does not name"),
    "GPTQ without its packages": (
        quantize_by("gptq"),
        UnsupportedModelError,
        "'gptq', which needs the package optimum and gptqmodel, not installed",
    ),
    "AWQ without its package": (quantize_by("awq"), UnsupportedModelError, "package gptqmodel"),
    "bitsandbytes without its package": (
        lambda folder: edit_json(
            folder / "config.json", quantization_config={"load_in_4bit": True}
        ),
        UnsupportedModelError,
        "package bitsandbytes",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("check", [check_checkpoint, load_model])
def test_faults_have_their_sentence(
    check: Callable[[str], object], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "is_installed", lambda _: False)
    spoil, kind, sentence = FAULTS[fault]
    name = save_model(tmp_path)
    check_checkpoint(name)
    spoil(tmp_path)
    with pytest.raises(kind, match=sentence) as caught:
        check(name)
    assert repr(name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_given_for_folders_are_told_apart(tmp_path: Path) -> None:
    name = save_model(tmp_path)
    with pytest.raises(UnsupportedModelError, match="is a file; give the folder"):
        check_checkpoint(f"{name}/model.safetensors")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnsupportedModelError, match="is a GGUF file"):
        check_checkpoint(f"{name}/model.gguf")


def test_a_folder_that_is_not_there_says_so() -> None:
    with pytest.raises(ModelNotFoundError, match="'/nowhere/model': there is no such folder"):
        check_checkpoint("/nowhere/model")


def test_a_name_that_cannot_be_an_id_says_so() -> None:
    with pytest.raises(ModelNotFoundError, match="neither a folder here nor a model"):
        check_checkpoint("no such model")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the files of "someone/model" have been cached."""
    folder = tmp_path / "snapshot"
    save_model(folder)

    def download(name: str, file: str, *, revision: str | None) -> str:
        response = httpx.Response(404, request=httpx.Request("GET", "https://hub"))
        if name == "someone/gated":
            raise GatedRepoError("gated", response=response)
        if revision is not None:
            raise RevisionNotFoundError("no such revision", response=response)
        if name == "someone/offline" or not (folder / file).is_file():
            raise LocalEntryNotFoundError("not cached")
        if name != "someone/model":
            raise RepositoryNotFoundError("unknown", response=response)
        return str(folder / file)

    monkeypatch.setattr(checkpoint, "hf_hub_download", download)
    return folder


def test_of_an_id_what_has_been_fetched_is_looked_at(hub: Path) -> None:
    check_checkpoint("someone/model")
    assert checkpoint.read_json("someone/model", "added_tokens.json") is None
    (hub / "model.safetensors").write_text(LFS_POINTER)
    with pytest.raises(DamagedModelError, match=r"'someone/model': model.safetensors is a Git-LFS"):
        check_checkpoint("someone/model")
    (hub / "model.safetensors").unlink()
    check_checkpoint("someone/model")  # its weights will be fetched
    edit_json(hub / "model.safetensors.index.json", weight_map={"a": "not-yet.safetensors"})
    check_checkpoint("someone/model")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("someone/gated", "is gated: accept its licence.*HF_TOKEN"),
        (
            ModelSource(name="someone/model", revision="v9"),
            "'someone/model' has no revision 'v9' on the hub; give a branch, a tag",
        ),
        ("someone/offline", "the hub cannot be reached"),
        ("someone/else", "neither a folder here nor a model"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_ids_that_cannot_be_fetched_say_why(name: AnyModel, reason: str) -> None:
    with pytest.raises(ModelNotFoundError, match=reason):
        check_checkpoint(name)


def test_code_of_a_known_model_type_is_left_alone(tmp_path: Path) -> None:
    """Many older checkpoints carry code for what transformers has learnt since."""
    name = save_model(tmp_path)
    edit_json(tmp_path / "config.json", auto_map={"AutoConfig": "my.MyConfig"})
    check_checkpoint(name)
    assert load_model(name, device="cpu").vocab_size == 97


def test_the_look_needs_no_torch(tmp_path: Path) -> None:
    """So that a start can look before it has waited for anything."""
    code = (
        "import sys; from workers.checkpoint import check_checkpoint; "
        f"check_checkpoint({save_model(tmp_path)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
