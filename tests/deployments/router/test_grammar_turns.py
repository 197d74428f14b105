"""Checking grammars: keys take turns at the compiler, and who hangs up has no further turns."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from deployments.router import grammars
from deployments.router.grammars import GrammarChecker
from deployments.router.tenants.keys import Tenant
from tests.workers.test_grammar import make_compiler
from workers.errors import InvalidRequestError, OverloadedError
from workers.grammar import Grammar
from workers.grammar_compiler import NUM_THREADS, GrammarCompiler

ALICE, BOB = Tenant(name="alice"), Tenant(name="bob")
QUIET = Grammar.regex("b")


class Held:
    """Compiling, which is noted and waits for the gate."""

    def __init__(self) -> None:
        self.begun: list[Grammar] = []
        self.gate = threading.Event()

    def index_of_quiet(self) -> int:
        return self.begun.index(QUIET)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held()
    compile_ = GrammarCompiler._compile

    def wait(compiler: GrammarCompiler, grammar: Grammar) -> object:
        held.begun.append(grammar)
        assert held.gate.wait(timeout=30)
        return compile_(compiler, grammar)

    monkeypatch.setattr(GrammarCompiler, "_compile", wait)
    yield held
    held.gate.set()


def check(checker: GrammarChecker, grammar: Grammar, tenant: Tenant) -> asyncio.Task[None]:
    return asyncio.create_task(checker.check(grammar, tenant, field="guided_regex"))


async def until_all_threads_compile(held: Held) -> None:
    async with asyncio.timeout(10):
        while len(held.begun) < NUM_THREADS:
            await asyncio.sleep(0.01)


async def test_many_grammars_of_one_key_do_not_hold_up_another(held: Held) -> None:
    checker = GrammarChecker(make_compiler())
    flood = [check(checker, Grammar.regex(f"a{{{n}}}"), ALICE) for n in range(1, 31)]
    await until_all_threads_compile(held)
    quiet = check(checker, QUIET, BOB)
    await asyncio.sleep(0)
    held.gate.set()
    await asyncio.gather(quiet, *flood)
    assert held.index_of_quiet() <= 2 * NUM_THREADS


async def test_who_sends_grammars_and_hangs_up_holds_up_nobody(held: Held) -> None:
    checker = GrammarChecker(make_compiler())
    for n in range(1, 31):
        leaving = check(checker, Grammar.regex(f"a{{{n}}}"), ALICE)
        await asyncio.sleep(0.001)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    await until_all_threads_compile(held)
    quiet = check(checker, QUIET, BOB)
    await asyncio.sleep(0)
    held.gate.set()
    await quiet
    assert held.index_of_quiet() <= NUM_THREADS


async def test_a_grammar_that_is_known_needs_no_turn(held: Held) -> None:
    compiler = make_compiler()
    held.gate.set()
    checker = GrammarChecker(compiler)
    wrong = Grammar.regex("(")
    await checker.check(QUIET, BOB, field=None)
    with pytest.raises(InvalidRequestError):
        await checker.check(wrong, BOB, field=None)
    held.gate.clear()
    flood = [check(checker, Grammar.regex(f"a{{{n}}}"), ALICE) for n in range(1, 9)]
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await checker.check(QUIET, ALICE, field=None)
        with pytest.raises(InvalidRequestError):
            await checker.check(wrong, ALICE, field=None)
    held.gate.set()
    await asyncio.gather(*flood)


async def test_who_has_no_turn_in_time_is_told_to_try_again(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others' grammars are to blame, and not this one."""
    checker = GrammarChecker(make_compiler())
    flood = [check(checker, Grammar.regex(f"a{{{n}}}"), ALICE) for n in range(1, 9)]
    await until_all_threads_compile(held)
    monkeypatch.setattr(grammars, "CHECK_TIMEOUT_S", 0.01)
    with pytest.raises(OverloadedError, match="try again"):
        await checker.check(QUIET, BOB, field=None)
    held.gate.set()
    await asyncio.gather(*flood)
