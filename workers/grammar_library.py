"""From the text of a grammar to a matcher of tokens: by llguidance, within limits of time and size.

A matcher says which tokens may come next, is told which one came, and can go back. The library
builds what it needs lazily, so compiling is short, and a mask is computed when it is asked for.
"""

import json
import re
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from workers.errors import GrammarStuckError, InvalidRequestError, first_line
from workers.grammar import Grammar
from workers.grammar_matcher import OutputMatcher
from workers.tool_call_grammar import ToolCalls, lark_string

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_SOURCE_LEN = 65_536
"""The most characters of a grammar."""
MAX_DEPTH = 64
"""The most brackets that may be open at a time: the library follows them on its stack."""
LEXER_FUEL = 100_000
STEP_MAX_ITEMS = 20_000
"""The library's limits of the work before the first mask and of each, some tens of ms and 12 ms at
the most that was seen: less than its own, as other sequences wait for the first. Ordinary grammars
use a hundredth."""
GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
"""The start of a rule in the form of llama.cpp, which Lark has not."""
NO_BYTES = "this model has no tokenizer that says the bytes of its tokens"


class GrammarLibrary:
    """The library with the vocabulary of one model, which is read when it is needed first."""

    def __init__(
        self,
        load_tokenizer: Callable[[], Any | None],
        *,
        vocab_size: int,
        end_tokens: tuple[int, ...],
    ) -> None:
        """
        Args:
            load_tokenizer: a tokenizer of transformers or tokenizers; None if there is none.
            vocab_size: tokens that a mask speaks of, those without a text included.
            end_tokens: what may follow a text that the grammar accepts.
        """
        self.vocab_size = vocab_size
        self.end_tokens = end_tokens
        self._load_tokenizer = load_tokenizer
        self._vocabulary: LLTokenizer | InvalidRequestError | None = None
        """What was read, or what is wrong with it."""
        self._special_tokens: dict[str, int] = {}
        """The ids of special tokens by their names: they are no text to the library."""
        self._loading = threading.Lock()

    def load(self) -> "LLTokenizer":
        """Read the vocabulary, once; raises InvalidRequestError if no token's bytes are known.

        It takes seconds and some 70 MiB where there are 128k tokens.
        """
        with self._loading:
            if self._vocabulary is None:
                try:
                    self._vocabulary = self._read()
                except InvalidRequestError as error:
                    self._vocabulary = error
        if isinstance(self._vocabulary, InvalidRequestError):
            raise InvalidRequestError(str(self._vocabulary))
        return self._vocabulary

    def tokenizer_text(self) -> str:
        """The tokenizer as the JSON of tokenizers, for another process; raises InvalidRequestError
        if it has none."""
        return cast("str", self._backend().to_str())

    def compile(self, grammar: Grammar) -> "LLMatcher":
        """A matcher of a grammar at its start, to be copied and not to be used itself.

        Raises InvalidRequestError for a grammar that is wrong, too large or too complex.
        """
        from llguidance import LLMatcher, LLParserLimits

        check_size(grammar)
        vocabulary = self.load()
        limits = LLParserLimits(
            initial_lexer_fuel=LEXER_FUEL,
            step_lexer_fuel=LEXER_FUEL,
            step_max_items=STEP_MAX_ITEMS,
            max_lexer_states=MAX_SOURCE_LEN,  # a list of texts needs one for each character
            verbose_errors=False,
        )
        try:
            serialized = serialize(grammar, self._special_tokens)
        except Exception as error:  # of many kinds, even of none but Exception
            raise refused(first_line(error)) from None
        matcher = LLMatcher(vocabulary, serialized, limits=limits, log_level=0)
        if matcher.is_error():
            raise refused(_with_function(vocabulary, grammar) or matcher.get_error())
        try:
            is_possible = any(self.follow(matcher).allowed())
        except GrammarStuckError as error:
            raise refused(error.reason) from None
        if not is_possible:
            raise refused("no text fits it")
        return matcher

    def follow(
        self, compiled: "LLMatcher", *, on_failure: Callable[[], None] = lambda: None
    ) -> OutputMatcher:
        """A matcher for one more output of a compiled grammar; see OutputMatcher.

        All of them share what the library has built of the grammar.
        """
        return OutputMatcher(
            compiled.deep_copy(),
            self.load(),
            vocab_size=self.vocab_size,
            end_tokens=self.end_tokens,
            on_failure=on_failure,
        )

    def _backend(self) -> Any:
        """The `tokenizers` tokenizer inside the model's, or the model's own if it has none."""
        tokenizer = self._load_tokenizer()
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not hasattr(backend, "to_str"):
            raise refused(NO_BYTES)
        if not self.end_tokens:
            raise refused("this model names no token that ends a text")
        return backend

    def _read(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        backend = self._backend()
        num_known = max(backend.get_vocab().values()) + 1
        try:
            vocabulary = LLTokenizer(
                backend.to_str(),
                n_vocab=max(self.vocab_size, num_known),
                eos_token=self.end_tokens[0],
            )
        except Exception as error:  # of a tokenizer whose tokens the library cannot spell
            raise refused(f"{NO_BYTES} ({first_line(error)})") from None
        self._special_tokens = {
            added.content: token
            for token, added in backend.get_added_tokens_decoder().items()
            if vocabulary.is_special_token(token)
        }
        return vocabulary


def check_size(grammar: Grammar) -> None:
    """Raise InvalidRequestError for what would take the library too long, or overflow its stack."""
    if len(grammar.source) > MAX_SOURCE_LEN:
        raise refused(
            f"it has {len(grammar.source)} characters; at most {MAX_SOURCE_LEN} are taken"
        )
    depth = deepest = 0
    for character in grammar.source:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    if deepest > MAX_DEPTH:
        raise refused(f"its brackets are nested {deepest} deep; at most {MAX_DEPTH} are taken")


def serialize(grammar: Grammar, special_tokens: Mapping[str, int]) -> str:
    """A grammar as the library takes it; raises whatever the library does for one that is wrong."""
    names = {
        tag: f"<[{special_tokens[tag]}]>" if tag in special_tokens else lark_string(tag)
        for tag in _tags(grammar)
    }
    first, *others = _body(grammar, names)
    if not grammar.starts_after:
        return json.dumps({"grammars": [first, *others]})
    rules = _thoughts_first(grammar, names, is_special=grammar.starts_after in special_tokens)
    whole = {"lark_grammar": rules}
    return json.dumps({"grammars": [whole, {**first, "name": "body"}, *others]})


def _thoughts_first(grammar: Grammar, names: Mapping[str, str], *, is_special: bool) -> str:
    """The rules of a grammar that does not start at once, in Lark's syntax.

    Args:
        names: what stands for each tag there.
        is_special: whether the tag that it starts after is a special token.
    """
    closing = names[grammar.starts_after]
    rules = [
        "start: before? @body" if grammar.opening else "start: before @body",
        f"before: {names.get(grammar.opening, '')} rest SPACE?",
        "SPACE: /[ \\t\\r\\n]{1,8}/",
    ]
    if is_special:
        rules += [f"rest: TEXT? {closing}", "TEXT: /(?s:.+)/"]
    else:
        rules.append(f"rest[suffix={closing}]: /(?s:.*)/")
    return "\n".join(rules) + "\n"


def _tags(grammar: Grammar) -> tuple[str, ...]:
    """Texts of a grammar that may be special tokens."""
    in_body = ToolCalls.of_source(grammar.source).tags if grammar.kind == "tool_calls" else ()
    return tuple(tag for tag in (grammar.opening, grammar.starts_after, *in_body) if tag)


def _body(grammar: Grammar, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Entries of the library's list of grammars, of which the first refers to the others."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    match grammar.kind:
        case "json_schema":
            schema = json.loads(grammar.source)
            return [{"json_schema": schema}]
        case "regex":
            serialized = LLMatcher.grammar_from_regex(grammar.source)
            entry: dict[str, Any] = json.loads(serialized)["grammars"][0]
            return [entry]
        case "choice":
            texts = " | ".join(lark_string(text) for text in json.loads(grammar.source))
            return [{"lark_grammar": f"start: CHOICE\nCHOICE: {texts}\n"}]
        case "lark":
            is_gbnf = GBNF_RULE.search(grammar.source) is not None
            rules = gbnf_to_lark(grammar.source) if is_gbnf else grammar.source
            return [{"lark_grammar": rules}]
        case "tool_calls":
            return ToolCalls.of_source(grammar.source).grammars(names)


def _with_function(vocabulary: "LLTokenizer", grammar: Grammar) -> str | None:
    """Why calls cannot be followed, with the function whose arguments are at fault; None if none
    is."""
    from llguidance import LLMatcher

    for function, arguments in grammar.functions():
        matcher = LLMatcher(vocabulary, serialize(arguments, {}), log_level=0)
        if matcher.is_error():
            return f"the parameters of {function!r}: {matcher.get_error()}"
    return None


def refused(reason: str) -> InvalidRequestError:
    """What a client is told of a grammar."""
    reason = reason.removesuffix("<non-verbose/>").strip()
    return InvalidRequestError(f"the grammar cannot be used: {reason}")
