"""What ends a text is the union of what a model's files say."""

import logging
from pathlib import Path

import pytest

from tests.tiny_configs import VOCAB_SIZE
from tests.tiny_models import edit_json, save_model, save_tokenizer
from workers.end_tokens import find_end_tokens, find_stop_strings
from workers.model import load_model

WORDS = [f"w{index}" for index in range(20)]


def save(
    folder: Path, *, generation: object = None, config: object = None, tokenizer: str | None = None
) -> str:
    name = save_model(folder)
    edit_json(folder / "generation_config.json", eos_token_id=generation)
    edit_json(folder / "config.json", eos_token_id=config)
    save_tokenizer(folder, WORDS, **({"eos_token": tokenizer} if tokenizer else {}))
    return name


@pytest.mark.parametrize(
    ("said", "end_tokens"),
    [
        ({"generation": [7, 9]}, (7, 9)),
        ({"config": 8}, (8,)),
        ({"tokenizer": "w4"}, (4,)),
        ({"generation": 7, "config": [8, 7], "tokenizer": "w4"}, (7, 8, 4)),
        ({"generation": [12], "config": 13, "tokenizer": "w14"}, (12, 13, 14)),
        ({}, ()),  # and not 2, which LlamaConfig would fill in
        ({"generation": VOCAB_SIZE, "config": -1}, ()),
    ],
)
def test_all_places_count(said: dict, end_tokens: tuple[int, ...], tmp_path: Path) -> None:  # type: ignore[type-arg]
    assert load_model(save(tmp_path, **said), device="cpu").eos_token_ids == end_tokens


def test_a_model_without_tokenizer_and_generation_config_has_those_of_its_config(
    tmp_path: Path,
) -> None:
    name = save_model(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert find_end_tokens(name, VOCAB_SIZE) == (2,)


def test_the_config_of_the_text_in_a_wrapper_counts(tmp_path: Path) -> None:
    name = save(tmp_path, config=5)
    edit_json(tmp_path / "config.json", text_config={"eos_token_id": [6]})
    assert find_end_tokens(name, VOCAB_SIZE) == (5, 6)


def test_a_token_that_the_tokenizer_lacks_is_not_the_unknown_one(tmp_path: Path) -> None:
    name = save(tmp_path, config=5)
    save_tokenizer(tmp_path, WORDS, eos_token="w4")
    tokenizer_config = tmp_path / "tokenizer_config.json"
    edit_json(tokenizer_config, eos_token="</s>")
    assert 0 not in find_end_tokens(name, VOCAB_SIZE)
    edit_json(tokenizer_config, eos_token=None)
    assert find_end_tokens(name, VOCAB_SIZE) == (5,)


@pytest.mark.parametrize(
    ("said", "level", "line"),
    [
        ({"generation": 7, "config": 7, "tokenizer": "w7"}, None, ""),
        ({"config": 7}, None, ""),
        ({"generation": [7, 8], "config": 7, "tokenizer": "w8"}, logging.INFO, "[7, 8] by gen"),
        ({"config": 7, "tokenizer": "w8"}, logging.WARNING, "[7] by config.json, [8] by the tok"),
        ({"tokenizer": "w8"}, logging.WARNING, "[8] by the tokenizer"),
        ({}, logging.WARNING, "no token that ends a text"),
    ],
)
def test_sources_that_differ_are_reported_in_one_line(
    said: dict,  # type: ignore[type-arg]
    level: int | None,
    line: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = save(tmp_path, **said)
    with caplog.at_level(logging.INFO, logger="workers"):
        find_end_tokens(name, VOCAB_SIZE)
    if level is None:
        assert caplog.records == []
    else:
        (record,) = caplog.records
        assert record.levelno == level
        assert line in record.getMessage()


@pytest.mark.parametrize(
    ("said", "strings"),
    [(None, ()), ("\n\n", ("\n\n",)), (["a", "", 7, "b"], ("a", "b")), (5, ())],
)
def test_answers_end_before_the_strings_of_the_configurations(
    said: object, strings: tuple[str, ...], tmp_path: Path
) -> None:
    name = save_model(tmp_path)
    edit_json(tmp_path / "generation_config.json", stop_strings=said)
    assert find_stop_strings(name) == strings
    save_tokenizer(tmp_path, WORDS)
    edit_json(tmp_path / "tokenizer_config.json", stop_strings="a")
    assert {*find_stop_strings(name)} == {*strings, "a"}
