"""Whether models can be served as asked, before anything is started."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from huggingface_hub import constants

from cluster import bundled, model_check, model_files
from cluster.found_model import Machine
from cluster.model_check import check_models
from cluster.model_files import check_files
from cluster.model_fit import check_fit
from cluster.options import AppArgs
from tests.tiny_models import save_model
from tests.tokenizers import save_speaking_model
from workers import quantizing
from workers.cache_size import GIB
from workers.errors import ConfigError, ModelNotFoundError, TandemError, UnsupportedModelError
from workers.model_source import ModelSource

MACHINE = Machine(num_cpus=2, memory_bytes=8 * GIB)


@pytest.fixture
def demo_copy(tmp_path: Path) -> Callable[..., str]:
    """A copy of a bundled model's small files, with changes to config.json."""

    def copy(name: str = bundled.TARGET_NAME, **changes: Any) -> str:
        folder = tmp_path / name
        folder.mkdir()
        for path in Path(bundled.resolve(name)).iterdir():
            if path.suffix == ".json":
                shutil.copy(path, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return str(folder)

    return copy


class TestFiles:
    def test_a_path_that_is_none_is_refused(self) -> None:
        with pytest.raises(ModelNotFoundError, match=r"'/no/such': there is no such folder"):
            check_files("/no/such")

    def test_what_its_files_say_is_seen_too(self, tmp_path: Path) -> None:
        (tmp_path / "model.gguf").write_bytes(b"GGUF")
        with pytest.raises(UnsupportedModelError, match="holds GGUF files only"):
            check_files(str(tmp_path))

    def test_a_name_that_is_no_id_is_refused(self) -> None:
        with pytest.raises(ModelNotFoundError, match="no Hugging Face model can have this id"):
            check_files("two words")

    def test_offline_only_downloaded_models_are_there(self) -> None:
        """Tests run with HF_HUB_OFFLINE."""
        with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE forbids to download it"):
            check_files("organization/name")

    @pytest.mark.parametrize(
        ("status", "words"),
        [
            (401, "ask for access"),
            (403, "set HF_TOKEN"),
            (404, "check the name"),
            ("GatedRepo", r"is gated: accept its licence.*set HF_TOKEN"),
            ("RevisionNotFound", "has no revision 'v9' on the hub"),
            (None, "reached"),
        ],
    )
    def test_a_hub_that_does_not_give_it_is_asked_once(
        self, status: int | str | None, words: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With the token, which a gated model's files are not given without."""
        calls = []

        class Session:
            def head(self, url: str, headers: dict[str, str], **_: Any) -> httpx.Response:
                calls.append(url)
                assert headers["Authorization"] == "Bearer hf_secret"
                if status is None:
                    raise ConnectionError("no network")
                if isinstance(status, str):
                    return httpx.Response(403, headers={"X-Error-Code": status})
                return httpx.Response(status)

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(model_files, "get_session", Session)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        with pytest.raises(ModelNotFoundError, match=words) as caught:
            check_files(ModelSource(name="organization/name", revision="v9"))
        assert "hf_secret" not in str(caught.value)
        (url,) = calls
        assert url.endswith("organization/name/resolve/v9/config.json")

    def test_what_is_there_passes(self) -> None:
        check_files(bundled.resolve(bundled.TARGET_NAME))


class TestFit:
    def test_the_bundled_pair_fits(self) -> None:
        target, draft = check_fit(AppArgs(), MACHINE)
        assert (target.name, target.dtype) == (bundled.TARGET_NAME, "bfloat16")
        assert draft.name == bundled.DRAFT_NAME

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"tensor_parallel_size": 3}, "tensor_parallel_size is 3.* it may be 1, 2$"),
            ({"max_model_len": 100_000}, "max_model_len is 100000.*4096 tokens only"),
            ({"kv_cache_gib": 500}, "kv_cache_gib is 500, but this machine has 8.0 GiB"),
            (
                {"kv_cache_gib": 0.0001},
                "kv_cache_gib is 0.0001, which holds 48 tokens.*at least kv_cache_gib=0.0079, or "
                "max_model_len=48",
            ),
            ({"kv_cache_gib": 0.0001, "max_model_len": 512}, "this does not fit: .*max_model_len"),
            ({"device": "cuda"}, "torch sees no GPU on this machine; use device=cpu"),
        ],
        ids=str,
    )
    def test_options_that_the_models_cannot_meet(self, options: Any, words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            check_fit(AppArgs(**options), MACHINE)

    def test_what_is_advised_fits(self) -> None:
        check_fit(AppArgs(kv_cache_gib=0.0079), MACHINE)
        check_fit(AppArgs(kv_cache_gib=0.0001, max_model_len=48), MACHINE)

    def test_weights_that_exceed_the_memory(self) -> None:
        with pytest.raises(ConfigError, match="this does not fit: "):
            check_fit(AppArgs(), Machine(num_cpus=2, memory_bytes=GIB // 4))

    def test_a_machine_with_one_gpu_holds_both_models_if_they_share_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        card = SimpleNamespace(total_memory=24 * GIB)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
        words = (
            "^this does not fit: the node has 1 GPU and the plan needs 2: .* draft_gpu_share=0.1"
        )
        with pytest.raises(ConfigError, match=words):
            check_fit(AppArgs(), MACHINE)
        target, draft = check_fit(AppArgs(draft_gpu_share=0.1), MACHINE)
        assert (target.name, draft.name) == (bundled.TARGET_NAME, bundled.DRAFT_NAME)

    @pytest.mark.parametrize("option", ["quantization", "draft_quantization"])
    def test_a_package_that_is_not_here(self, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(quantizing, "is_installed", lambda _: False)
        with pytest.raises(ConfigError, match=f"^{option} is 'int8', which needs .* torchao"):
            check_fit(AppArgs(**{option: "int8"}), MACHINE)
        check_fit(AppArgs(**{option: "int8"}), None)  # other machines may have it

    def test_quantized_weights_take_less(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(quantizing, "is_installed", lambda _: True)
        plain = check_fit(AppArgs(), MACHINE)
        target, draft = check_fit(AppArgs(quantization="int8"), MACHINE)
        assert target.dtype == "bfloat16 (int8)"
        assert target.weight_bytes < 0.8 * plain[0].weight_bytes
        assert draft == plain[1]

    def test_other_vocabularies(self, tmp_path: Path) -> None:
        draft = save_model(tmp_path / "draft")
        with pytest.raises(ConfigError, match=r"^target 'tandem-demo' and .* no tokenizer that"):
            check_fit(AppArgs(draft=draft), MACHINE)

    def test_what_is_done_with_other_tokens_is_said(self, tmp_path: Path) -> None:
        draft = save_speaking_model(tmp_path / "draft", "letters")
        with pytest.raises(ConfigError, match="use heterogeneous_vocab=retokenize"):
            check_fit(AppArgs(draft=draft, heterogeneous_vocab="intersection"), MACHINE)
        target, found = check_fit(AppArgs(draft=draft), MACHINE)
        assert target.vocabulary == ""
        assert "heterogeneous_vocab=retokenize: it has 6% of the target's" in found.vocabulary
        assert "100% of its" in found.vocabulary

    def test_a_target_without_tokenizer(self, tmp_path: Path) -> None:
        target = save_model(tmp_path / "target")
        with pytest.raises(ConfigError, match="has no tokenizer that can be loaded"):
            check_fit(AppArgs(target=target, drafter="none"), MACHINE)

    @pytest.mark.parametrize(
        "changes",
        [
            {"model_type": "no_such_model"},
            {"hidden_size": "wide"},
            {"num_attention_heads": 0},
            {"layer_types": ["linear_attention"] * 4},
        ],
        ids=str,
    )
    def test_a_config_that_makes_no_sense(
        self, changes: Any, demo_copy: Callable[..., str]
    ) -> None:
        with pytest.raises(TandemError, match="model"):
            check_fit(AppArgs(target=demo_copy(**changes), drafter="none"), MACHINE)

    def test_on_other_machines_memory_is_not_judged(self) -> None:
        assert check_fit(AppArgs(kv_cache_gib=500), None) == ()
        with pytest.raises(ConfigError, match="it may be 1, 2"):
            check_fit(AppArgs(tensor_parallel_size=3), None)


def test_the_question_is_answered_by_another_process(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        check_models(AppArgs(target=str(tmp_path), drafter="none"), MACHINE)


def test_models_that_only_other_machines_have_are_left_to_them() -> None:
    assert check_models(AppArgs(target="/no/such", drafter="none"), None) == ()


def test_a_check_that_fails_itself_is_no_reason_not_to_start(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_check, "RUN", "raise SystemExit('no torch here')")
    assert check_models(AppArgs(), MACHINE) == ()
    assert "could not be checked before the start" in caplog.text


def test_a_target_without_so_many_layers_to_draft_with_is_refused() -> None:
    args = AppArgs(drafter="early_exit", early_exit_layer=4)
    with pytest.raises(ConfigError) as caught:
        check_fit(args, None)
    assert str(caught.value) == (
        "early_exit_layer is 4, but 'tandem-demo' has 4 layers; it must be from 1 to 3"
    )
