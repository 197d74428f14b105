"""Options on the command line, and their help."""

import pytest

from deployments.args import AppArgs
from tandem.options import options_help, parse_words, wants_help
from workers.errors import ConfigError


def test_words_are_names_and_values() -> None:
    words = ["gamma=2", "--http-port=8080", "target=org/a=b"]
    assert parse_words(words) == {"gamma": "2", "http_port": "8080", "target": "org/a=b"}


@pytest.mark.parametrize("word", ["gamma", "gamma=", "--gamma", "=2", "config.yaml"])
def test_other_words_are_explained(word: str) -> None:
    with pytest.raises(ConfigError, match=r"written name=value, like gamma=2.*--help"):
        parse_words([word])


def test_options_of_two_words_or_without_a_value_are_explained() -> None:
    for words, written in (
        (["--port", "8000"], "http_port=8000"),
        (["--port", "--gamma=2"], "http_port=<its value>"),
        (["--tensor-parallel-size", "2"], "tensor_parallel_size=2"),
        (["--max-num-seqs"], "max_num_seqs=<its value>"),
        (["--enable-prefix-caching"], "prefix_caching=on"),
        (["--trust-remote-code"], "trust_remote_code=on"),
        (["--enforce-eager"], "compile=off"),
    ):
        with pytest.raises(ConfigError, match=f"; write {written}$"):
            parse_words(words)
    with pytest.raises(
        ConfigError, match=r"lists them; name keys in the environment, TANDEM_API_K"
    ):
        parse_words(["--api-key", "secret"])
    with pytest.raises(ConfigError, match=r"; draft has no value: leave it out for its default$"):
        parse_words(["draft="])


def test_a_model_by_itself_is_taken_for_the_target() -> None:
    with pytest.raises(ConfigError, match=r"if it is a model, write target=org/model-8B$"):
        parse_words(["org/model-8B"])


@pytest.mark.parametrize("word", ["target=a\nb", "served_model_name=\udcff", "\x1b[2J"])
def test_a_word_that_cannot_be_printed_is_refused_in_one_line(word: str) -> None:
    with pytest.raises(ConfigError, match="cannot be printed") as caught:
        parse_words([word])
    assert str(caught.value).isprintable()


def test_an_option_is_given_once() -> None:
    with pytest.raises(ConfigError, match="gamma is given twice: '2' and '3'"):
        parse_words(["gamma=2", "gamma=3"])


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help_is_asked_for(word: str) -> None:
    assert wants_help(["gamma=2", word])
    assert not wants_help(["served_model_name=help"])


def test_help_has_every_option_its_default_and_its_meaning() -> None:
    text = options_help()
    for name, field in AppArgs.model_fields.items():
        default = "" if field.default is None else field.default
        assert f"\n  {name}={default}\n" in text
        assert field.description is not None
        assert " ".join(field.description.split()) in " ".join(text.split())
