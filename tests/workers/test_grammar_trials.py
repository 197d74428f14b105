"""Trials of grammars: one that compiles without end costs a process, and nothing else."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.fakes import byte_tokenizer
from tests.grammars import END_TOKEN, TEXTS, VOCAB_SIZE
from workers.errors import InvalidRequestError, TandemError
from workers.grammar import Grammar
from workers.grammar_library import GrammarLibrary
from workers.grammar_trials import GrammarTrials

ENDLESS = Grammar.json_schema({"type": "integer", "multipleOf": 2_147_483_648})
GOOD = Grammar.regex("[ab]*")


def trials(**options: Any) -> GrammarTrials:
    tokenizer = byte_tokenizer(TEXTS)
    library = GrammarLibrary(lambda: tokenizer, vocab_size=VOCAB_SIZE, end_tokens=(END_TOKEN,))
    return GrammarTrials(library, **options)


@pytest.fixture(scope="module")
def shared() -> GrammarTrials:
    return trials()


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("grammar", [GOOD, Grammar.regex("("), Grammar.json_object()])
def test_what_compiling_ends_with_is_left_to_who_compiles(
    shared: GrammarTrials, grammar: Grammar
) -> None:
    shared.run(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        ENDLESS,
        Grammar.lark('start: %json {"type": "integer", "multiple\\u004ff" : 3000017}'),
    ],
)
@pytest.mark.parametrize(
    "limits", [{"max_memory_mb": 4096}, {"max_computing_s": 60}], ids=["time", "memory"]
)
def test_a_grammar_without_end_is_refused_and_the_next_one_is_tried(
    grammar: Grammar, limits: dict[str, int]
) -> None:
    """The library makes a state for each remainder of a division."""
    tried = trials(**limits)
    tried.run(GOOD)
    pid = tried.pid
    with pytest.raises(InvalidRequestError, match=r"takes more than .* make it simpler"):
        tried.run(grammar)
    tried.run(GOOD)
    assert tried.pid == pid


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.json_schema({"properties": {f"p{i}": {"type": "string"} for i in range(1000)}}),
        Grammar.json_schema({"enum": [f"value {i}" for i in range(3000)]}),
        Grammar.json_schema({"type": "number", "multipleOf": 2.5e-3}),
        Grammar.json_schema({"type": "integer", "multipleOf": 9973}),
    ],
)
def test_large_ordinary_grammars_may_be_used(shared: GrammarTrials, grammar: Grammar) -> None:
    """The process that forks has memory of its own, which does not count."""
    shared.run(grammar)


def test_others_are_tried_beside_one_without_end(shared: GrammarTrials) -> None:
    with ThreadPoolExecutor(1) as thread:
        endless = thread.submit(shared.run, ENDLESS)
        for _ in range(3):
            shared.run(GOOD)
        assert isinstance(endless.exception(), InvalidRequestError)


def test_a_process_that_was_killed_is_started_again() -> None:
    tried = trials()
    tried.run(GOOD)
    os.kill(tried.pid, signal.SIGKILL)
    tried.run(GOOD)


def test_without_a_process_no_grammar_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = trials()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(TandemError, match="cannot be tried"):
        tried.run(GOOD)


def test_the_process_ends_with_its_owner() -> None:
    tried = trials()
    tried.run(GOOD)
    pid = tried.pid
    del tried
    assert has_ended(pid)


OWNER = """
import sys, time
from tokenizers import Tokenizer
from workers.grammar import Grammar
from workers.grammar_library import GrammarLibrary
from workers.grammar_trials import GrammarTrials
tokenizer = Tokenizer.from_str(sys.argv[1])
trials = GrammarTrials(GrammarLibrary(lambda: tokenizer, vocab_size=288, end_tokens=(0,)))
trials.run(Grammar.regex("a"))
print(trials.pid, flush=True)
time.sleep(600)
"""


def test_the_process_ends_where_its_owner_is_killed() -> None:
    command = [sys.executable, "-c", OWNER, byte_tokenizer(TEXTS).to_str()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.kill()
    for _ in range(1000):
        if has_ended(pid):
            return
        time.sleep(0.01)
    pytest.fail("it did not end")
