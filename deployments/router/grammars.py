"""Checking the grammars of requests: beside the event loop, and refused where they cannot be used.

The router compiles a grammar by the same rules as the workers, so what it lets in they can follow.
"""

import asyncio
from typing import TYPE_CHECKING

from deployments.router.tokenizer import Tokenizer
from workers.errors import InvalidRequestError
from workers.grammar import Grammar
from workers.grammar_compiler import GrammarCompiler
from workers.types import WorkerInfo

if TYPE_CHECKING:
    from llguidance import LLMatcher

CHECK_TIMEOUT_S = 10.0
"""How long a grammar may wait for its turn and be compiled. The limits of the compiler end each
within a fraction of a second; where many come at once, some are refused."""


def make_compiler(tokenizer: Tokenizer, info: WorkerInfo) -> GrammarCompiler:
    """What compiles grammars for the target's tokens."""
    return GrammarCompiler(
        lambda: tokenizer, vocab_size=info.vocab_size, end_tokens=info.eos_token_ids
    )


async def check_grammar(
    compiler: GrammarCompiler, grammar: Grammar | None, *, field: str | None
) -> None:
    """Raise InvalidRequestError, for the client's `field`, if the grammar cannot be used."""
    if grammar is None:
        return
    compiling = asyncio.wrap_future(compiler.compile(grammar))
    compiling.add_done_callback(_look_at_its_error)
    try:
        # it is shared by all who use the grammar, so none of them cancels it
        await asyncio.wait_for(asyncio.shield(compiling), CHECK_TIMEOUT_S)
    except TimeoutError:
        raise InvalidRequestError(
            f"the grammar was not compiled within {CHECK_TIMEOUT_S:g} s; make it simpler",
            field=field,
        ) from None
    except InvalidRequestError as error:
        is_calls = grammar.kind == "tool_calls"
        fix = "; change that, or let tool_choice be auto" if is_calls else ""
        raise InvalidRequestError(f"{error}{fix}", field=field) from None


def _look_at_its_error(compiling: "asyncio.Future[LLMatcher]") -> None:
    """Whoever asked may have left: asyncio would log an error that nobody has looked at."""
    if not compiling.cancelled():
        compiling.exception()
