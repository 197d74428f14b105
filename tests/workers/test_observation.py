"""Models whose attention would come out otherwise over pages are refused, with the reason."""

from pathlib import Path

import pytest
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from tests.tiny_configs import MAX_POSITION
from tests.tiny_models import save_model
from workers.errors import UnsupportedModelError
from workers.model import load_model

WINDOW = 8
REFUSED = {
    "phimoe": ({"sliding_window": WINDOW}, "layer 0 by a window of 8 tokens, but names no window"),
    "qwen2_moe": (
        {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
        "layer 0 by a window of 8 tokens, but names no window",
    ),
    "doge": ({}, "an attention mask of its own"),
    "diffllama": ({}, "attends 2 times in one layer"),
    "rwkv": ({}, "takes 0 of its 2 layers through transformers' attention interface"),
    "falcon": ({}, "attention classes of its own"),
    "bert": ({}, "in both directions"),
    "recurrent_gemma": ({}, "keeps a state in layer 0 in a way that is not known"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_pages_cannot_hold_is_refused(family: str, tmp_path: Path) -> None:
    changes, reason = REFUSED[family]
    name = save_model(tmp_path, family, **changes)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        load_model(name, dtype="float32", device="cpu")
    assert f"model {name!r} ({family})" in str(caught.value)


def test_a_model_without_layers_is_refused(tmp_path: Path) -> None:
    name = save_model(tmp_path, num_hidden_layers=0)
    with pytest.raises(UnsupportedModelError, match="num_hidden_layers is 0"):
        load_model(name, dtype="float32", device="cpu")


def test_a_window_that_no_text_reaches_is_none(tmp_path: Path) -> None:
    name = save_model(tmp_path, "phimoe", sliding_window=MAX_POSITION)
    assert load_model(name, dtype="float32", device="cpu").max_position == MAX_POSITION
    name = save_model(tmp_path / "shorter", "phimoe", sliding_window=MAX_POSITION - 1)
    with pytest.raises(UnsupportedModelError, match="a window of 255 tokens"):
        load_model(name, dtype="float32", device="cpu")


def test_a_window_that_the_mask_lacks_is_refused_too(tmp_path: Path) -> None:
    """OLMoE passes its config's window on, which no mask of its own has ever had."""
    name = save_model(tmp_path, "olmoe", sliding_window=WINDOW)
    with pytest.raises(UnsupportedModelError, match="by no window, but names a window of 8 tokens"):
        load_model(name, dtype="float32", device="cpu")


def test_chunks_are_seen_in_the_mask(tmp_path: Path) -> None:
    """No layer names them to the attention function."""
    model = load_model(save_model(tmp_path, "llama4"), dtype="float32", device="cpu")
    assert [spec.chunk_len for spec in model.layer_specs] == [WINDOW, None, WINDOW]
    longer = save_model(tmp_path / "longer", "llama4", attention_chunk_size=MAX_POSITION)
    model = load_model(longer, dtype="float32", device="cpu")
    assert {spec.chunk_len for spec in model.layer_specs} == {None}


def test_observing_leaves_transformers_as_it_was(tmp_path: Path) -> None:
    load_model(save_model(tmp_path), dtype="float32", device="cpu")
    names = {*AttentionInterface._global_mapping, *AttentionMaskInterface._global_mapping}
    assert {name for name in names if "tandem" in name} == {"tandem_paged"}
    assert "tandem_paged" not in AttentionMaskInterface._global_mapping  # no masks are made
