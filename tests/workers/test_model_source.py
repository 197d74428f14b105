"""Revisions of a model on Hugging Face, and code that it brings."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError
from transformers import AutoModelForCausalLM

from cluster.model_files import check_files
from cluster.plan.model_size import size_model
from deployments.router.tokenizer import load_tokenizer
from tests.tiny_models import edit_json, save_model, save_tokenizer
from tests.workers.decoding import CACHE, generate, make_prompt
from workers.end_tokens import find_end_tokens, find_stop_strings
from workers.errors import ConfigError, ModelNotFoundError, TandemError, UnsupportedModelError
from workers.model import load_config, load_model
from workers.model_source import ModelSource
from workers.target import Target
from workers.vocabulary import compare_vocabularies

ID = "someone/model"
COMMITS = {"main": "1" * 40, "old": "2" * 40}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of downloaded models: of someone's, which has changed in all its files, two
    revisions."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / f"models--{ID.replace('/', '--')}"
    for seed, (revision, commit) in enumerate(COMMITS.items()):
        folder = home / "snapshots" / commit
        save_model(folder, seed=seed, num_hidden_layers=2 + seed)
        words = ["unknown", revision, *(f"word{index}" for index in range(50))]
        save_tokenizer(folder, words, chat_template=f"template of {revision}")
        generation = {"eos_token_id": 10 + seed, "stop_strings": [revision]}
        edit_json(folder / "generation_config.json", **generation)
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / revision).write_text(commit)
    return home


@pytest.mark.parametrize("revision", [None, "main", "old", COMMITS["old"]])
@pytest.mark.usefixtures("cache")
def test_all_files_are_of_the_revision(revision: str | None) -> None:
    source = ModelSource(name=ID, revision=revision)
    index = int(revision in ("old", COMMITS["old"]))
    name = ("main", "old")[index]
    check_files(source)
    assert load_config(source).num_hidden_layers == 2 + index
    tokenizer = load_tokenizer(source)
    assert tokenizer.chat_template == f"template of {name}"
    assert tokenizer.encode(name) == [1]
    assert 10 + index in find_end_tokens(source, 97)
    assert 11 - index not in find_end_tokens(source, 97)
    assert find_stop_strings(source) == (name,)
    assert size_model(source).weight_bytes == size_model(source, dtype="float32").weight_bytes


def test_weights_are_of_the_revision(cache: Path) -> None:
    source = ModelSource(name=ID, revision="old")
    model = load_model(source, device="cpu")
    assert (model.name, model.source) == (ID, source)
    reference: Any = AutoModelForCausalLM.from_pretrained(cache / "snapshots" / COMMITS["old"])
    prompt = make_prompt(3, 8)
    with torch.inference_mode():
        expected = int(reference(torch.tensor([prompt])).logits[0, -1].argmax())
    assert generate(Target(model, CACHE), prompt, 1) == [expected]


@pytest.mark.usefixtures("cache")
def test_vocabularies_are_of_the_revisions() -> None:
    old = ModelSource(name=ID, revision="old")
    assert compare_vocabularies(old, old).method == "direct"
    token_map = compare_vocabularies(ID, old).token_map
    assert token_map is not None
    assert token_map.draft_of == {token: token for token in range(52) if token != 1}


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("check", [check_files, load_config, load_model])
def test_a_revision_that_is_not_here_is_named(check: Any) -> None:
    with pytest.raises(ModelNotFoundError, match=r"'someone/model' \(revision 'v9'\)"):
        check(ModelSource(name=ID, revision="v9"))


@pytest.mark.parametrize("check", [check_files, load_config, load_model])
def test_a_folder_has_no_revisions(check: Any, tmp_path: Path) -> None:
    source = ModelSource(name=save_model(tmp_path), revision="main")
    with pytest.raises(ConfigError, match=r"\(revision 'main'\) is a folder.*draft_revision of a"):
        check(source)


@pytest.mark.usefixtures("cache")
def test_weights_behind_a_gate_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models show their configuration to anybody."""
    import httpx

    def fail(*_: object, **__: object) -> None:
        response = httpx.Response(403, request=httpx.Request("GET", "https://hub"))
        raise OSError("You are trying to access a gated repo.\nMake sure") from GatedRepoError(
            "403", response=response
        )

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ModelNotFoundError, match=r"is gated: accept its licence.*HF_TOKEN"):
        load_model(ID, device="cpu")


# Code that a model brings

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
WITHOUT_ATTENTION = """
    def forward(self, input_ids, **_):
        from transformers.modeling_outputs import CausalLMOutput

        return CausalLMOutput(logits=self.lm_head(self.model.embed_tokens(input_ids))[:, -1:])
"""


def save_own_code(folder: Path, code: str = CODE) -> str:
    name = save_model(folder)
    (folder / "own.py").write_text(code)
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    edit_json(folder / "config.json", model_type="own", auto_map=classes, architectures=None)
    return name


@pytest.fixture
def _own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transformers keeps copies of such code."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))


@pytest.mark.usefixtures("_own_modules")
def test_code_runs_if_it_is_trusted(tmp_path: Path) -> None:
    name = save_own_code(tmp_path / "own")
    for check in (check_files, load_config, load_model, size_model):
        with pytest.raises(UnsupportedModelError, match=r"not run unless.*trust_remote_code=true"):
            check(name)
    source = ModelSource(name=name, trust_remote_code=True)
    check_files(source)
    plain = save_model(tmp_path / "plain")
    texts = [
        generate(Target(load_model(model, device="cpu"), CACHE), make_prompt(1, 5), 8)
        for model in (source, plain)
    ]
    assert texts[0] == texts[1]
    assert size_model(source).weight_bytes == size_model(plain).weight_bytes


@pytest.mark.usefixtures("_own_modules")
def test_code_that_cannot_be_paged_is_refused(tmp_path: Path) -> None:
    name = save_own_code(tmp_path / "own", CODE + WITHOUT_ATTENTION)
    with pytest.raises(UnsupportedModelError, match="layers through transformers' attention"):
        load_model(ModelSource(name=name, trust_remote_code=True), device="cpu")


@pytest.mark.usefixtures("_own_modules")
def test_code_that_fails_is_an_error_of_ours(tmp_path: Path) -> None:
    name = save_own_code(tmp_path / "own", "raise ValueError('of its own')")
    with pytest.raises(TandemError, match="of its own"):
        load_model(ModelSource(name=name, trust_remote_code=True), device="cpu")


def test_code_for_what_transformers_knows_is_not_run_even_then(tmp_path: Path) -> None:
    name = save_model(tmp_path)
    edit_json(tmp_path / "config.json", auto_map={"AutoConfig": "own.OwnConfig"})
    (tmp_path / "own.py").write_text("raise ValueError('run')")
    source = ModelSource(name=name, trust_remote_code=True)
    assert load_model(source, device="cpu").vocab_size == 97
    shutil.rmtree(tmp_path)
