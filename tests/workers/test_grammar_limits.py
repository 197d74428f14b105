"""What outputs share of a grammar that one of them has used up."""

import random

import pytest
from tokenizers import Tokenizer

from cluster import bundled
from tests.grammars import allowed_tokens
from workers.errors import GrammarStuckError
from workers.grammar import Grammar
from workers.grammar_compiler import GrammarCompiler
from workers.model import load_model
from workers.sampling_params import SamplingParams
from workers.target import Target
from workers.types import VerifyRequest, VerifyResult


def use_up(compiler: GrammarCompiler, grammar: Grammar) -> None:
    """Follow one output until the library meets a limit. Long tokens have it build much."""
    matcher, rng = compiler.matcher(grammar), random.Random(0)
    for _ in range(300):
        assert matcher.push(rng.choice(sorted(allowed_tokens(matcher) - {0})))


@pytest.mark.parametrize(("length", "words"), [(300, "many expressions"), (200, "many states")])
def test_an_output_that_uses_up_a_limit_leaves_the_next_one_a_grammar(
    length: int, words: str
) -> None:
    """Outputs share what the library builds of a grammar, up to its limits."""
    tokenizer = Tokenizer.from_file(f"{bundled.resolve(bundled.TARGET_NAME)}/tokenizer.json")
    num_tokens = tokenizer.get_vocab_size()
    compiler = GrammarCompiler(lambda: tokenizer, vocab_size=num_tokens, end_tokens=(0,))
    grammar = Grammar.regex(f"(?s:.*[aeiou].{{{length}}}x1)")
    with pytest.raises(GrammarStuckError, match=words):
        use_up(compiler, grammar)
    fresh = compiler.matcher(grammar)
    assert fresh.move_to(tokenizer.encode("a text").ids)
    assert fresh.allowed()


def test_who_shares_a_grammar_that_is_used_up_goes_on() -> None:
    """A target has its caller send the sequence again, and follows it by a grammar of its own."""
    target = Target(load_model(bundled.resolve(bundled.TARGET_NAME), dtype="float32"))
    grammar = Grammar.regex("(?s:.*[aeiou].{200}x1)")
    prompt = (40, 50, 60)

    def ask(seq_id: str, output: tuple[int, ...], *, base_len: int) -> VerifyResult:
        tokens = prompt + output
        (result,) = target.verify(
            [
                VerifyRequest(
                    seq_id=seq_id,
                    base_len=base_len,
                    new_tokens=tokens[base_len:],
                    prompt_len=len(prompt),
                    sampling=SamplingParams(temperature=0.0, grammar=grammar),
                    seed=0,
                )
            ]
        )
        return result

    first = ask("victim", (), base_len=0).tokens
    with pytest.raises(GrammarStuckError):
        use_up(target._grammars._compiler, grammar)
    lost = ask("victim", first, base_len=len(prompt))
    assert lost.needs_tokens_from == 0
    assert not lost.error
    again = ask("victim", first, base_len=0)
    assert again.tokens == ask("another", first, base_len=0).tokens
    assert again.tokens
    with pytest.raises(GrammarStuckError):
        use_up(target._grammars._compiler, grammar)
    output = first + again.tokens
    assert ask("victim", output, base_len=len(prompt) + 1).tokens  # its grammar is its own
    assert ask("another", output, base_len=len(prompt) + 1).needs_tokens_from == 0
    assert target._begun_again == {"victim", "another"}
    target.release(["victim", "another"])
    assert not target._begun_again

    ask("third", (), base_len=0)
    target._begun_again.add("third")
    with pytest.raises(GrammarStuckError):
        use_up(target._grammars._compiler, grammar)
    lost = ask("third", first, base_len=len(prompt))
    assert lost.is_refused
    assert "cannot be followed any further" in lost.error
    assert "make it simpler" in lost.error
    assert not target._begun_again
