"""What a model's folder holds, read before anything is loaded: JSON files and safetensors headers.

Neither torch nor any model is imported for it, so that a start can look before it begins, and say
in one sentence what is wrong.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from workers import quantization
from workers.errors import (
    ConfigError,
    DamagedModelError,
    ModelNotFoundError,
    UnsupportedModelError,
    first_line,
)
from workers.model_source import AnyModel, ModelSource
from workers.safetensors_header import read_header

CONFIG = "config.json"
LFS_POINTER = b"version https://git-lfs"
GGUF_MAGIC = b"GGUF"
# In the order in which transformers looks for them.
WEIGHTS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def check_checkpoint(name: AnyModel) -> None:
    """Make sure, as far as files can tell, that a model can be loaded and is served right.

    Of a Hugging Face id only config.json is fetched; what else is in the cache is looked at too.

    Raises: ModelNotFoundError, DamagedModelError, UnsupportedModelError.
    """
    config = read_config(name)
    folder = _folder_of(name)
    quantization.check_method(name, _quantization_of(folder, config))
    is_quantized = quantization.declared_in(config) is not None
    for file in TOKENIZER_FILES:
        if (folder / file).is_file():
            _check_not_pointer(name, folder / file)
    for path in _find_weights(name, folder):
        _check_weights(name, path, is_quantized=is_quantized)


def read_config(name: AnyModel) -> dict[str, Any]:
    """The content of a model's config.json, without what its class would add.

    Raises: ModelNotFoundError, DamagedModelError, and UnsupportedModelError for what is no model
    of transformers.
    """
    config = read_json(name, CONFIG)
    if config is None:
        raise _explain_missing_config(name, Path(ModelSource.of(name).name))
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UnsupportedModelError(
            f"model {name!r}: its config.json names no model_type, so it is no model of "
            "transformers; convert it with the scripts of its makers"
        )
    _check_model_type(name, model_type, config)
    return config


def read_json(name: AnyModel, file: str) -> dict[str, Any] | None:
    """The content of one of a model's JSON files; None if the model has no such file.

    Raises: ModelNotFoundError if there is no such model, DamagedModelError if it is no JSON object,
    ConfigError for a revision of a folder.
    """
    path = _find_file(name, file)
    if path is None:
        return None
    _check_not_pointer(name, path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON or of UTF-8
        raise DamagedModelError(
            f"model {name!r}: its {file} is no valid JSON ({first_line(error)}); get the file again"
        ) from None
    if not isinstance(content, dict):
        raise DamagedModelError(f"model {name!r}: its {file} is no JSON object")
    return content


def _find_file(name: AnyModel, file: str) -> Path | None:
    source = ModelSource.of(name)
    folder = Path(source.name)
    if folder.is_dir():
        _check_no_revision(source)
        return folder / file if (folder / file).is_file() else None
    if folder.is_file():
        raise _explain_file(name, folder)
    if looks_like_path(source.name):
        raise ModelNotFoundError(
            f"model {name!r}: there is no such folder on this machine; give the path of a folder "
            "with config.json and weights, or a Hugging Face model id"
        )
    try:
        return Path(hf_hub_download(source.name, file, revision=source.revision))
    except LocalEntryNotFoundError as error:
        if file != CONFIG:  # of a model that is here; offline, what it lacks looks like this
            return None
        raise ModelNotFoundError(
            f"model {name!r} was not found: it is no folder here, {file} is not in the Hugging "
            "Face cache, and the hub cannot be reached"
        ) from error
    except EntryNotFoundError:
        return None
    except GatedRepoError as error:
        raise explain_gate(name) from error
    except RevisionNotFoundError as error:
        raise explain_revision(source) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFoundError(
            f"model {name!r} was not found: it is neither a folder here nor a model on the Hugging "
            "Face hub that this machine may read"
        ) from error
    except OSError as error:
        raise ModelNotFoundError(f"model {name!r} was not found: {first_line(error)}") from error


def _check_no_revision(source: ModelSource) -> None:
    if source.revision is not None:
        raise ConfigError(
            f"model {source!r} is a folder, which has no revisions; leave out revision, or "
            "draft_revision of a draft model, or give the model's Hugging Face id"
        )


def explain_gate(name: AnyModel) -> ModelNotFoundError:
    """The error to raise for a model that the hub gives to those alone who have asked for it."""
    return ModelNotFoundError(
        f"model {name!r} is gated: accept its licence on its page of the hub, and set HF_TOKEN to "
        "a token of the account that has"
    )


def explain_revision(source: ModelSource) -> ModelNotFoundError:
    """The error to raise for a revision that a model on the hub has not."""
    return ModelNotFoundError(
        f"model {source.name!r} has no revision {source.revision!r} on the hub; give a branch, a "
        "tag or a whole commit id of it"
    )


def looks_like_path(name: str) -> bool:
    """Whether a name can only be a path; such names are never asked for over the network."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1


def _folder_of(name: AnyModel) -> Path:
    """Where the model's files lie; those of a Hugging Face id perhaps not all yet."""
    config = _find_file(name, CONFIG)
    assert config is not None  # it has been read
    return config.parent


def _explain_file(name: AnyModel, path: Path) -> UnsupportedModelError:
    if path.suffix == ".gguf" or _starts_with(path, GGUF_MAGIC):
        return UnsupportedModelError(
            f"model {name!r} is a GGUF file, which cannot be served; give the folder or the id of "
            "the original model, with config.json and safetensors"
        )
    return UnsupportedModelError(
        f"model {name!r} is a file; give the folder that holds it, together with config.json"
    )


def _explain_missing_config(
    name: AnyModel, folder: Path
) -> UnsupportedModelError | ModelNotFoundError:
    if (folder / "adapter_config.json").is_file():
        return UnsupportedModelError(
            f"model {name!r} is a LoRA adapter, not a model; merge it into its base model "
            "(merge_and_unload() of peft, then save_pretrained) and give that folder"
        )
    if folder.is_dir() and any(folder.glob("*.gguf")):
        return UnsupportedModelError(
            f"model {name!r} holds GGUF files only, which cannot be served; give the folder or the "
            "id of the original model, with config.json and safetensors"
        )
    if (folder / "params.json").is_file() or (folder / "model_index.json").is_file():
        return UnsupportedModelError(
            f"model {name!r} has no config.json: it is in another format than that of "
            "transformers' language models; give a folder or an id in transformers' format"
        )
    return ModelNotFoundError(
        f"model {name!r} has no config.json; give a folder or an id with config.json and weights"
    )


def _check_model_type(name: AnyModel, model_type: str, config: dict[str, Any]) -> None:
    from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES  # slow to import

    if model_type in CONFIG_MAPPING_NAMES:
        return
    if config.get("auto_map"):
        if ModelSource.of(name).trust_remote_code:
            return
        raise UnsupportedModelError(
            f"model {name!r} ({model_type}) brings its own code, which is not run unless you trust "
            "it: read it, then give trust_remote_code=true, or take a model whose type "
            "transformers knows"
        )
    raise UnsupportedModelError(
        f"model {name!r} has model_type {model_type!r}, which the installed transformers does not "
        "know; the model may need a newer transformers"
    )


def _quantization_of(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    declared = quantization.declared_in(config)
    if declared is None and (folder / "hf_quant_config.json").is_file():
        return {"quant_method": "modelopt"}
    return declared


def _find_weights(name: AnyModel, folder: Path) -> Iterator[Path]:
    """The files that transformers would load, as far as they are here."""
    is_local = Path(ModelSource.of(name).name).is_dir()
    for single, index in WEIGHTS:
        if (folder / single).is_file():
            yield folder / single
            return
        if (folder / index).is_file():
            yield from _find_shards(name, folder, index, is_local=is_local)
            return
    if is_local:
        others = sorted(p.name for p in folder.iterdir() if p.suffix in (".safetensors", ".gguf"))
        seen = f" (there is {others[0]!r}, which transformers does not load)" if others else ""
        raise ModelNotFoundError(
            f"model {name!r} has a config.json but no weights: neither model.safetensors, nor its "
            f"index and shards, nor pytorch_model.bin{seen}"
        )


def _find_shards(name: AnyModel, folder: Path, index: str, *, is_local: bool) -> Iterator[Path]:
    content = read_json(str(folder), index) or {}
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict):
        raise DamagedModelError(f"model {name!r}: its {index} has no weight_map; get it again")
    for shard in sorted(set(map(str, weight_map.values()))):
        if (folder / shard).is_file():
            yield folder / shard
        elif is_local:
            raise DamagedModelError(
                f"model {name!r} is incomplete: {shard!r}, which {index} names, is missing; "
                "get it again"
            )


def _check_weights(name: AnyModel, path: Path, *, is_quantized: bool) -> None:
    _check_not_pointer(name, path)
    if path.stat().st_size == 0:
        raise DamagedModelError(f"model {name!r}: {path.name} is empty; get it again")
    if path.suffix != ".safetensors":
        return
    try:
        header = read_header(path)
    except ValueError as error:
        raise DamagedModelError(
            f"model {name!r}: {path.name} is damaged ({error}); get it again"
        ) from None
    if not is_quantized:
        quantization.check_dtypes(name, {key: entry.dtype for key, entry in header.items()})


def _check_not_pointer(name: AnyModel, path: Path) -> None:
    if _starts_with(path, LFS_POINTER):
        raise DamagedModelError(
            f"model {name!r}: {path.name} is a Git-LFS pointer, not the file itself; run `git lfs "
            "pull` in that folder, or fetch the model with `hf download`"
        )


def _starts_with(path: Path, prefix: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(prefix)) == prefix
