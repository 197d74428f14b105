"""Checking the grammars of requests: beside the event loop, and refused where they cannot be used.

The router compiles a grammar by the same rules as the workers, so what it lets in they can follow;
in a process of its own first, which ends where that takes too much.
"""

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING

from deployments.router.tenants.keys import Tenant
from deployments.router.tenants.slots import Slots
from deployments.router.tokenizer import Tokenizer
from workers.errors import InvalidRequestError, OverloadedError
from workers.grammar import Grammar
from workers.grammar_compiler import NUM_THREADS, GrammarCompiler
from workers.types import WorkerInfo

if TYPE_CHECKING:
    from llguidance import LLMatcher

CHECK_TIMEOUT_S = 10.0
"""How long a grammar may wait for its turn and be compiled. Each computes for a second at most, so
it takes longer only where many come at once."""


def make_compiler(tokenizer: Tokenizer, info: WorkerInfo) -> GrammarCompiler:
    """What compiles grammars for the target's tokens."""
    return GrammarCompiler(
        lambda: tokenizer,
        vocab_size=info.vocab_size,
        end_tokens=info.eos_token_ids,
        has_trials=True,
    )


class GrammarChecker:
    """Checks the grammars of one router's requests, in turns between keys."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._turns = Slots(NUM_THREADS)

    async def check(self, grammar: Grammar | None, tenant: Tenant, *, field: str | None) -> None:
        """Raise InvalidRequestError, for the client's `field`, if the grammar cannot be used, and
        OverloadedError if too many are compiled before it."""
        if grammar is None:
            return
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                compiling = await self._begin(grammar, tenant)
                # it is shared by all who use the grammar, so none of them cancels it
                await asyncio.shield(compiling)
        except TimeoutError:
            raise OverloadedError(
                f"the grammar was not compiled within {CHECK_TIMEOUT_S:g} s, as many others are; "
                "try again",
                retry_after_s=CHECK_TIMEOUT_S,
            ) from None
        except InvalidRequestError as error:
            is_calls = grammar.kind == "tool_calls"
            fix = "; change that, or let tool_choice be auto" if is_calls else ""
            raise InvalidRequestError(f"{error}{fix}", field=field) from None

    async def _begin(self, grammar: Grammar, tenant: Tenant) -> "asyncio.Future[LLMatcher]":
        """Have the grammar compiled when it is the tenant's turn; at once if it was before.

        The turn ends with the compiling, even if the client leaves: else one who sends grammars and
        hangs up would have any number compiled.
        """
        with ExitStack() as turn:
            if not self._compiler.has_begun(grammar):
                place = turn.enter_context(self._turns.queue(tenant, priority=0, num_tokens=1))
                await place.has_slot.wait()
                place.num_used = 1
            compiling = asyncio.wrap_future(self._compiler.compile(grammar))
            compiling.add_done_callback(_look_at_its_error)
            ending = turn.pop_all()
            compiling.add_done_callback(lambda _: ending.close())
        return compiling


def _look_at_its_error(compiling: "asyncio.Future[LLMatcher]") -> None:
    """Whoever asked may have left: asyncio would log an error that nobody has looked at."""
    if not compiling.cancelled():
        compiling.exception()
