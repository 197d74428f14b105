"""Which tokens end a text, and which strings an answer.

A model's files say it in up to three places, and makers of chat models often change one of them
only: so all of them count. What a configuration class or a generation config fills in where the
files say nothing does not: for the vocabulary at hand it may be any word.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from workers.checkpoint import read_json
from workers.model_source import AnyModel
from workers.tokenizer import find_tokenizer

logger = logging.getLogger(__name__)

TOKENIZER = "the tokenizer"
GENERATION, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"


def find_end_tokens(name: AnyModel, vocab_size: int) -> tuple[int, ...]:
    """The ids after which a text has ended, of all that the model's files name.

    One line of the log says so where they do not agree: a warning where only the tokenizer names
    its token, or nothing names any.
    """
    config = read_json(name, "config.json") or {}
    text_config = config.get("text_config")
    in_text = _ids(text_config) if isinstance(text_config, dict) else ()
    named = {
        GENERATION: _ids(read_json(name, GENERATION) or {}),
        "config.json": tuple(dict.fromkeys((*_ids(config), *in_text))),
        TOKENIZER: _ids_of_tokenizer(name),
    }
    named = {
        source: tuple(token for token in tokens if 0 <= token < vocab_size)
        for source, tokens in named.items()
    }
    _report(name, named)
    return tuple(dict.fromkeys(token for tokens in named.values() for token in tokens))


def find_stop_strings(name: AnyModel) -> tuple[str, ...]:
    """The strings before which a model's answers end: `stop_strings` of its generation config, as
    transformers has them, and of its tokenizer's configuration, where `generate` of transformers
    passes them over."""
    found = [_strings(read_json(name, file) or {}) for file in (GENERATION, TOKENIZER_CONFIG)]
    return tuple(dict.fromkeys(string for strings in found for string in strings))


def _strings(content: Mapping[str, Any]) -> Sequence[str]:
    strings = content.get("stop_strings")
    strings = strings if isinstance(strings, list) else [strings]
    return [string for string in strings if isinstance(string, str) and string]


def _ids(content: Mapping[str, Any]) -> tuple[int, ...]:
    tokens = content.get("eos_token_id")
    tokens = tokens if isinstance(tokens, list) else [tokens]
    return tuple(token for token in tokens if type(token) is int)  # a bool is none


def _ids_of_tokenizer(name: AnyModel) -> tuple[int, ...]:
    tokenizer = find_tokenizer(name)
    if tokenizer is None or tokenizer.eos_token is None:
        return ()
    # a token that it lacks would be given the id of the unknown token
    token = tokenizer.get_vocab().get(str(tokenizer.eos_token))
    return () if token is None else (int(token),)


def _report(name: AnyModel, named: Mapping[str, Sequence[int]]) -> None:
    all_named = {frozenset(tokens) for tokens in named.values() if tokens}
    if not all_named:
        logger.warning(
            "model %r names no token that ends a text, so texts end at max_tokens or a stop string",
            name,
        )
    elif len(all_named) > 1 or not (named[GENERATION] or named["config.json"]):
        others = {*named[GENERATION], *named["config.json"]}
        level = logging.INFO if others.issuperset(named[TOKENIZER]) else logging.WARNING
        said = ", ".join(
            f"{list(tokens)} by {source}" for source, tokens in named.items() if tokens
        )
        logger.log(level, "model %r: any of these tokens ends a text: %s", name, said)
