"""Grammars, and tiny models with a tokenizer that they can be compiled for."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.fakes import END, byte_tokenizer
from tests.tiny_models import save_model, save_quick_model
from workers.grammar import Grammar
from workers.grammar_compiler import GrammarCompiler
from workers.grammar_matcher import OutputMatcher

VOCAB_SIZE = 288
"""More than the tokenizer has: some tokens stand for nothing, as where embeddings are padded."""
END_TOKEN = 0
TEXTS = ('{"name": "value", "count": 12}', "the quick brown fox, one, two and three\n")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["first", "second", "third"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
RESPONSE_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "person", "strict": True, "schema": PERSON},
}
ARITHMETIC = """
start: expr
expr: expr "+" term | term
term: "(" expr ")" | NUMBER
NUMBER: /[0-9]{1,3}/
"""
GBNF = 'root ::= "yes" | "no" ("!" | "?")\n'

GRAMMARS = {
    "schema": Grammar.json_schema(PERSON),
    "object": Grammar.json_object(),
    "regex": Grammar.regex(r"(ab|cd)+-[0-9]{2,9}"),
    "choice": Grammar.choice(["red", "redder", 'a "quoted" one', "grün\n"]),
    "lark": Grammar.lark(ARITHMETIC),
    "gbnf": Grammar.lark(GBNF),
}


def allowed_tokens(matcher: OutputMatcher) -> set[int]:
    """The tokens that may come next."""
    bits = matcher.allowed()
    return {token for token in range(8 * len(bits)) if bits[token // 8] >> token % 8 & 1}


def save_grammar_model(folder: Path, *, family: str | None = "llama") -> str:
    """Write a tiny model, the quickest where no family is named, and a byte-level tokenizer;
    "<|end|>" ends its texts."""
    changes = {"vocab_size": VOCAB_SIZE, "eos_token_id": END_TOKEN}
    if family is None:
        name = save_quick_model(folder, **changes)
    else:
        name = save_model(folder, family, **changes)
    tokenizer = byte_tokenizer(TEXTS)
    assert tokenizer.token_to_id(END) == END_TOKEN
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)
    return name


@contextmanager
def compiling_held() -> Iterator[threading.Event]:
    """No grammar is compiled before the event is set, or this ends."""
    gate = threading.Event()
    compile_ = GrammarCompiler._compile

    def wait(compiler: GrammarCompiler, grammar: Grammar) -> object:
        assert gate.wait(timeout=30)
        return compile_(compiler, grammar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarCompiler, "_compile", wait)
        try:
            yield gate
        finally:
            gate.set()
