"""Grammars: what they match, token by token, and what is refused."""

import dataclasses
import random
from collections.abc import Iterator

import pytest

from tests.fakes import byte_tokenizer
from tests.grammars import END_TOKEN, GRAMMARS, TEXTS, VOCAB_SIZE, allowed_tokens
from tests.tokenizers import whole_words
from workers.errors import InvalidRequestError
from workers.grammar import Grammar
from workers.grammar_compiler import GrammarCompiler
from workers.grammar_library import MAX_SOURCE_LEN
from workers.tool_call_grammar import ToolCalls, WrittenCall

TOKENIZER = byte_tokenizer(TEXTS)
UNUSED_TOKEN = VOCAB_SIZE - 1


def make_compiler(tokenizer: object = TOKENIZER, end_tokens: tuple[int, ...] = (END_TOKEN,)):
    return GrammarCompiler(lambda: tokenizer, vocab_size=VOCAB_SIZE, end_tokens=end_tokens)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return make_compiler()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def matches(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    """Whether a text may be the whole of a completion."""
    return compiler.matcher(grammar).move_to([*ids(text), END_TOKEN])


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (
            GRAMMARS["schema"],
            ['{"name": "a", "count": 7, "kind": "third"}', '{"name":"","count":0,"kind":"first"}'],
            ['{"name": "a"}', '{"count": 7, "name": "a", "kind": "third"}', "[]", ""],
        ),
        (GRAMMARS["object"], ["{}", '{"a": [1, {"b": null}]}'], ["[]", "{", "{} x"]),
        (GRAMMARS["regex"], ["ab-12", "abcdab-123"], ["ab", "-12", "ab-1", "ab-12x"]),
        (GRAMMARS["choice"], ["red", "redder", 'a "quoted" one', "grün\n"], ["re", "redd", "x"]),
        (GRAMMARS["lark"], ["1", "(1+2)+(3)"], ["", "1+", "(1", "1234"]),
        (GRAMMARS["gbnf"], ["yes", "no!", "no?"], ["no", "yes!", "maybe"]),
        (Grammar.lark('start[max_tokens=9]: "a"'), ["a"], ["", "b"]),
    ],
    ids=["schema", "object", "regex", "choice", "lark", "gbnf", "attributes"],
)
def test_a_text_ends_where_its_grammar_accepts_it(
    compiler: GrammarCompiler, grammar: Grammar, right: list[str], wrong: list[str]
) -> None:
    assert [text for text in right if not matches(compiler, grammar, text)] == []
    assert [text for text in wrong if matches(compiler, grammar, text)] == []


def walks(grammar: Grammar, compiler: GrammarCompiler, seed: int) -> Iterator[list[int]]:
    """Random outputs that the grammar allows, token by token."""
    rng = random.Random(seed)
    matcher, output = compiler.matcher(grammar), list[int]()
    for _ in range(30):
        yield list(output)
        matcher.move_to(output)
        token = rng.choice(sorted(allowed_tokens(matcher)))
        output.append(token)


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_mask_allows_the_tokens_that_can_be_matched(compiler: GrammarCompiler, name: str) -> None:
    """Where the text is forced, only as the tokenizer cuts it."""
    for output in walks(GRAMMARS[name], compiler, seed=1):
        matcher = compiler.matcher(GRAMMARS[name])
        assert matcher.move_to(output)
        allowed, forced = allowed_tokens(matcher), matcher.forced()
        matched = {token for token in range(VOCAB_SIZE) if matcher.move_to([*output, token])}
        assert allowed == ({forced[0]} if forced else matched)
        assert allowed <= matched
        assert UNUSED_TOKEN not in allowed


@pytest.mark.parametrize("name", GRAMMARS)
def test_going_back_and_forth_leads_to_the_same_place(compiler: GrammarCompiler, name: str) -> None:
    rng = random.Random(2)
    wandering = compiler.matcher(GRAMMARS[name])
    outputs = [output for seed in range(3) for output in walks(GRAMMARS[name], compiler, seed=seed)]
    for output in rng.sample(outputs, 40):
        fresh = compiler.matcher(GRAMMARS[name])
        assert fresh.move_to(output)
        assert wandering.move_to(output)
        assert wandering.allowed() == fresh.allowed()
        assert wandering.forced() == fresh.forced()
        wandering.push(rng.randrange(VOCAB_SIZE))  # maybe a forbidden one


def test_behind_the_end_there_are_only_ends(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(GRAMMARS["gbnf"])
    assert not matcher.push(END_TOKEN)
    assert matcher.move_to(ids("no?"))
    assert allowed_tokens(matcher) == {END_TOKEN}
    assert matcher.push(END_TOKEN)
    assert matcher.push(END_TOKEN)
    assert not matcher.push(ids("n")[0])
    assert allowed_tokens(matcher) == {END_TOKEN}
    assert matcher.move_to(ids("n"))
    assert END_TOKEN not in allowed_tokens(matcher)


def test_every_end_token_may_end_a_text() -> None:
    others = (END_TOKEN, ids("x")[0], UNUSED_TOKEN)
    matcher = make_compiler(end_tokens=others).matcher(Grammar.regex("[xy]*"))
    assert allowed_tokens(matcher) >= {*others}
    matcher = make_compiler(end_tokens=others).matcher(Grammar.regex("[xy]+"))
    assert allowed_tokens(matcher).isdisjoint(others)


def test_a_grammar_may_start_behind_other_text(compiler: GrammarCompiler) -> None:
    for grammar in (
        Grammar.choice(["yes", "no"], starts_after="</think>"),
        Grammar.regex("yes|no", starts_after="</think>"),
        Grammar.json_schema({"enum": [1, 2]}, starts_after="</think>"),
        Grammar.lark('start: "yes" | "no"', starts_after="</think>"),
    ):
        answer = "1" if grammar.kind == "json_schema" else "no"
        assert matches(compiler, grammar, f"let me see: yes, <no> </think>{answer}")
        assert not matches(compiler, grammar, answer)
        assert not matches(compiler, grammar, f"hm</think>{answer} or so")
        assert not matches(compiler, grammar, f"hm</think>x</think>{answer}")


def test_thoughts_may_be_left_out_where_they_need_an_opening(compiler: GrammarCompiler) -> None:
    grammar = Grammar.choice(["yes", "no"], starts_after="</think>")
    grammar = dataclasses.replace(grammar, opening="<think>")
    for text in ("no", "<think>yes or no</think>no", "<think></think>\n\nyes"):
        assert matches(compiler, grammar, text)
    for text in (
        "hm</think>no",
        "<think>hm</think>",
        "<think>no",
        "<think>a</think>b</think>no",
        "\nno",
    ):
        assert not matches(compiler, grammar, text)


def test_tags_may_be_special_tokens() -> None:
    tokenizer = byte_tokenizer(TEXTS)
    tokenizer.add_special_tokens(["<think>", "</think>"])
    opening, closing = (tokenizer.token_to_id(tag) for tag in ("<think>", "</think>"))
    compiler = make_compiler(tokenizer)
    grammar = Grammar.choice(["yes", "no"], starts_after="</think>")
    thinking = dataclasses.replace(grammar, opening="<think>")
    answer = [*ids("no"), END_TOKEN]
    for fitting in (
        [opening, *ids("hm"), closing, *answer],
        [opening, closing, *ids("\n"), *answer],
        answer,
    ):
        assert compiler.matcher(thinking).move_to(fitting)
    assert compiler.matcher(grammar).move_to([*ids("hm"), closing, *answer])
    assert not compiler.matcher(grammar).move_to([*ids("hm</think>"), *answer])
    assert not compiler.matcher(thinking).move_to([*ids("hm"), closing, *answer])


def test_tags_of_calls_may_be_special_tokens() -> None:
    """Before the calls and behind them, and behind thoughts."""
    tokenizer = byte_tokenizer(TEXTS)
    tokenizer.add_special_tokens(["<call>"])
    tag = tokenizer.token_to_id("<call>")
    call = WrittenCall(function="f", before="<call>f", schema={"enum": [1]}, after=";")
    grammar = Grammar.tool_calls(ToolCalls(calls=(call,), tags=("<call>", "<none>")))
    thinking = dataclasses.replace(grammar, starts_after="</think>")
    compiler = make_compiler(tokenizer)
    calls = [tag, *ids("f1;"), tag, *ids("f1;"), END_TOKEN]
    assert compiler.matcher(grammar).move_to(calls)
    assert compiler.matcher(thinking).move_to([*ids("hm</think> "), *calls])
    assert not compiler.matcher(grammar).move_to(ids("<call>"))
    assert matches(make_compiler(), grammar, "<call>f1;")
    one = Grammar.tool_calls(ToolCalls(calls=(call,), tags=("<call>",), is_one=True))
    assert not compiler.matcher(one).move_to(calls)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar.choice(["<|end|>"]), "<|end|>"),
        (Grammar.choice(["<|end|>a", "<|end|>b"]), "<|end|>a"),
        (Grammar.choice(["ü <tag><|end|> é"]), "ü <tag><|end|> é"),
        (Grammar.json_schema({"const": "<tag>"}), '"<tag>"'),
        (Grammar.lark('start: "a<tag>" <[TAG]> "b<tag>"'), "a<tag><tag>b<tag>"),
    ],
    ids=["alone", "of several", "behind text", "in a schema", "beside the token"],
)
def test_a_text_may_have_the_name_of_a_special_token(grammar: Grammar, text: str) -> None:
    """It is spelt by other tokens, and forced as any text is; a token that is meant stays one."""
    tokenizer = byte_tokenizer(TEXTS)
    tokenizer.add_special_tokens(["<tag>"])
    tag = tokenizer.token_to_id("<tag>")
    grammar = dataclasses.replace(grammar, source=grammar.source.replace("TAG", str(tag)))
    matcher, output = make_compiler(tokenizer).matcher(grammar), list[int]()
    while allowed_tokens(matcher) != {END_TOKEN}:
        allowed, forced = allowed_tokens(matcher), matcher.forced()
        assert allowed == {*forced[:1]} or not forced
        output.append(min(allowed))
        assert matcher.push(output[-1])
    assert END_TOKEN not in output
    assert output.count(tag) == (grammar.kind == "lark")
    assert tokenizer.decode(output, skip_special_tokens=False) == text


def test_a_choice_may_have_any_character(compiler: GrammarCompiler) -> None:
    texts = ["a\x7f", "\x80\u2028", '"\\\n']
    for text in texts:
        assert matches(compiler, Grammar.choice([*texts, "b"]), text)


def test_what_is_forced_is_known_in_advance(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(Grammar.json_schema({"enum": ["a long text without a choice"]}))
    assert TOKENIZER.decode(matcher.forced()) == '"a long text without a choice"'
    assert compiler.matcher(GRAMMARS["lark"]).forced() == []


HOSTILE = {
    "nested brackets of a regex": Grammar.regex("(" * 5000 + "a" + ")" * 5000),
    "nested brackets of a schema": Grammar(
        kind="json_schema", source='{"items":' * 5000 + "{}" + "}" * 5000
    ),
    "a long source": Grammar.regex("a" * (MAX_SOURCE_LEN + 1)),
    "an unknown rule": Grammar.lark("start: nowhere"),
    "a wrong regex": Grammar.regex("(a"),
    "a wrong schema": Grammar.json_schema({"type": "nothing"}),
    "a reference to nowhere": Grammar.json_schema({"$ref": "#/$defs/nowhere"}),
    "a reference elsewhere": Grammar.json_schema({"$ref": "https://example.org/schema.json"}),
    "a schema that nothing is valid by": Grammar.json_schema(
        {"allOf": [{"type": "string"}, {"type": "null"}]}
    ),
    "nested conjunctions": Grammar.json_schema(
        {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}{j}": {"minLength": j}}} for j in range(12)]}
                for i in range(12)
            ]
        }
    ),
    "no rule at all": Grammar.lark("0"),
    "an unknown rule of llama.cpp's": Grammar.lark("root ::= nowhere"),
    "an endless rule": Grammar.lark("start: start start | start"),
}


@pytest.mark.parametrize(
    ("regex", "text"), [('"a".."z"{99999}', '"a"c世"z""'), ("x{99999}", "xxxx")]
)
def test_a_grammar_that_runs_into_a_limit_says_so(
    compiler: GrammarCompiler, regex: str, text: str
) -> None:
    """Whether it allows a token is not known any more then."""
    matcher = compiler.matcher(Grammar.regex(regex))

    def follow() -> None:
        for token in ids(text):
            matcher.allowed()
            matcher.push(token)

    with pytest.raises(InvalidRequestError, match="cannot be followed any further: lexer error"):
        follow()


def test_a_mask_that_would_take_long_is_refused(compiler: GrammarCompiler) -> None:
    """The time of a mask is quadratic in the rules that may come next."""
    rules = "".join(f'x{i}: "a" | "b"\n' for i in range(600))
    optional = " ".join(f"x{i}?" for i in range(600))
    matcher = compiler.matcher(Grammar.lark(f"start: {optional}\n{rules}"))
    with pytest.raises(InvalidRequestError, match="Current row has"):
        matcher.push(*ids("a"))


def test_the_vocabulary_is_read_once_and_may_be_read_before() -> None:
    num_read = 0

    def load() -> object:
        nonlocal num_read
        num_read += 1
        return TOKENIZER

    compiler = GrammarCompiler(load, vocab_size=VOCAB_SIZE, end_tokens=(END_TOKEN,))
    compiler.start_loading()
    compiler._threads.shutdown()
    assert num_read == 1
    assert compiler._library.load() is compiler._library.load()
    assert num_read == 1


def test_a_tokenizer_whose_tokens_cannot_be_spelt_is_told_and_read_once() -> None:
    num_read = 0

    def load() -> object:
        nonlocal num_read
        num_read += 1
        return whole_words()  # no decoder says how its words are put together

    compiler = GrammarCompiler(load, vocab_size=VOCAB_SIZE, end_tokens=(END_TOKEN,))
    for regex in ("a", "b"):
        with pytest.raises(InvalidRequestError, match=r"^the grammar cannot be used: this m"):
            compiler.compile(Grammar.regex(regex)).result()
    assert num_read == 1


@pytest.mark.parametrize("what", HOSTILE)
def test_a_grammar_that_cannot_be_used_is_refused(compiler: GrammarCompiler, what: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.matcher(HOSTILE[what])
    assert str(caught.value).startswith("the grammar cannot be used: ")
    assert len(str(caught.value)) < 600
