"""Trials of grammars: one that compiles without end costs a process, and nothing else."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from tests.fakes import byte_tokenizer
from tests.grammars import END_TOKEN, TEXTS, VOCAB_SIZE, allowed_tokens
from workers import grammar_trials
from workers.errors import InvalidRequestError, TandemError
from workers.grammar import Grammar
from workers.grammar_compiler import GrammarCompiler
from workers.grammar_library import GrammarLibrary
from workers.grammar_trials import GrammarTrials
from workers.tool_call_grammar import ToolCalls, WrittenCall

ENDLESS = Grammar.json_schema({"type": "integer", "multipleOf": 2_147_483_648})
GOOD = Grammar.regex("[ab]*")


def make_library() -> GrammarLibrary:
    tokenizer = byte_tokenizer(TEXTS)
    return GrammarLibrary(lambda: tokenizer, vocab_size=VOCAB_SIZE, end_tokens=(END_TOKEN,))


def trials(**options: Any) -> GrammarTrials:
    return GrammarTrials(make_library(), **options)


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
    ("limits", "message"),
    [
        ({"max_memory_mb": 4096}, "takes more than 1 s; make it simpler"),
        ({"max_computing_s": 60}, "takes more than 32 MiB; make it simpler"),
    ],
)
def test_a_grammar_without_end_is_refused_and_the_next_one_is_tried(
    grammar: Grammar, limits: dict[str, int], message: str
) -> None:
    """The library makes a state for each remainder of a division."""
    tried = trials(**limits)
    tried.run(GOOD)
    pid = tried.pid
    with pytest.raises(InvalidRequestError, match=message):
        tried.run(grammar)
    tried.run(GOOD)
    assert tried.pid == pid


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (
            Grammar.json_schema({"properties": {f"p{i}": {"type": "string"} for i in range(400)}}),
            '{"p7": "", "p399": "a"}',
        ),
        (Grammar.json_schema({"enum": [f"value {i}" for i in range(3000)]}), '"value 2999"'),
        (Grammar.json_schema({"type": "number", "multipleOf": 2.5e-3}), "0.0075"),
        (Grammar.json_schema({"type": "integer", "multipleOf": 86_400}), "172800"),
        (
            Grammar.lark(
                "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(100)) + 'r100: "a"'
            ),
            "a",
        ),
    ],
)
def test_large_ordinary_grammars_may_be_used(
    shared: GrammarTrials, grammar: Grammar, text: str
) -> None:
    """The process that forks has memory of its own, which does not count."""
    shared.run(grammar)
    library = make_library()
    matcher = library.follow(library.compile(grammar))
    for token in byte_tokenizer(TEXTS).encode(text).ids:
        assert token in allowed_tokens(matcher)
        assert matcher.push(token)
    assert END_TOKEN in allowed_tokens(matcher)


def test_rules_deep_within_rules_are_refused_before_they_overflow_a_stack(
    shared: GrammarTrials,
) -> None:
    """On the stack of a trial, which is less than others have."""
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(2000))
    grammar = Grammar.lark(f'start: r0\n{rules}r2000: "a"')
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        shared.run(grammar)
    make_library().compile(grammar)  # a thread has room for it


def test_the_function_at_fault_is_named(shared: GrammarTrials) -> None:
    calls = [
        WrittenCall(function=name, schema={"type": "object", "properties": {"at": schema}})
        for name, schema in {
            "first": {"type": "string"},
            "second": json.loads(ENDLESS.source),
            "third": {"type": "string"},
        }.items()
    ]
    with pytest.raises(InvalidRequestError, match=r"\(at the parameters of 'second'\); make"):
        shared.run(Grammar.tool_calls(ToolCalls(calls=tuple(calls))))
    shared.run(Grammar.tool_calls(ToolCalls(calls=(calls[0], calls[2]))))


@pytest.mark.parametrize("odd", [{"x-guidance": None}, {"not": {}}, {"type": "no such type"}])
def test_one_function_at_fault_keeps_no_other_from_being_tried(
    shared: GrammarTrials, odd: dict[str, Any]
) -> None:
    endless = {"properties": {"at": json.loads(ENDLESS.source)}}
    calls = (
        WrittenCall(function="odd", schema=odd),
        WrittenCall(function="endless", schema=endless),
    )
    with pytest.raises(InvalidRequestError, match="parameters of 'endless'"):
        shared.run(Grammar.tool_calls(ToolCalls(calls=calls)))


def test_blank_lines_are_read_at_once(shared: GrammarTrials) -> None:
    shared.run(Grammar.lark("\n" * 60_000 + 'start: "a"'))


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


def forks_of(tried: GrammarTrials) -> list[psutil.Process]:
    return psutil.Process(tried.pid).children(recursive=True)


@pytest.mark.parametrize("generation", [0, -1], ids=["that watches", "that compiles"])
def test_a_trial_that_was_killed_is_tried_again(generation: int) -> None:
    tried = trials(max_memory_mb=4096)
    tried.run(GOOD)
    with ThreadPoolExecutor(1) as thread:
        endless = thread.submit(tried.run, ENDLESS)
        while len(forks := forks_of(tried)) < 2:
            time.sleep(0.001)
        sorted(forks, key=lambda fork: fork.pid)[generation].kill()
        with pytest.raises(InvalidRequestError, match="takes more than 1 s"):
            endless.result()


def test_a_grammar_at_which_the_library_breaks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a panic, which is no Exception in Python."""
    fails = "from workers.grammar_library import GrammarLibrary\nGrammarLibrary.compile = exit\n"
    start, serve = grammar_trials.PROGRAM.split("serve(")
    monkeypatch.setattr(grammar_trials, "PROGRAM", f"{start}\n{fails}serve({serve}")
    with pytest.raises(InvalidRequestError, match="the library fails at it; make it simpler"):
        trials().run(GOOD)


def test_a_process_that_hangs_is_replaced() -> None:
    tried = trials(answer_timeout_s=1.0)
    tried.run(GOOD)
    os.kill(tried.pid, signal.SIGSTOP)
    tried.run(GOOD)


def test_a_grammar_that_could_not_be_tried_may_be_tried_by_the_next_who_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = byte_tokenizer(TEXTS)
    compiler = GrammarCompiler(
        lambda: tokenizer, vocab_size=VOCAB_SIZE, end_tokens=(END_TOKEN,), has_trials=True
    )
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(TandemError, match="cannot be tried"):
            compiler.matcher(GOOD)
    compiler.matcher(GOOD)


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
from workers.grammar_compiler import GrammarCompiler
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
