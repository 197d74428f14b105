"""From the text of a grammar to a matcher of tokens: by llguidance, within limits of time and size.

A matcher says which tokens may come next, is told which one came, and can go back. The library
builds what it needs lazily, so compiling is short, and a mask is computed when it is asked for.
"""

import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

from workers.errors import GrammarStuckError, InvalidRequestError, first_line
from workers.grammar import Grammar
from workers.grammar_matcher import OutputMatcher
from workers.tool_call_grammar import ToolCalls

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_SOURCE_LEN = 65_536
"""The most characters of a grammar."""
MAX_DEPTH = 64
"""The most brackets that may be open at a time: the library follows them on its stack."""
MAX_MULTIPLE = 10_000
"""The most that numbers are a multiple of in a JSON schema, all of it together and without zeros at
the end: the library makes a state for each remainder, and none of its own limits ends that."""
MULTIPLE_OF = re.compile(r'multipleOf\\*"\s*:\s*([-+.\deE]+)')
ESCAPED = re.compile(r"\\u([\da-fA-F]{4})")
"""A character of JSON that is written as its number."""
MAX_COMPILED = 64
"""The most grammars that are kept compiled."""
LEXER_FUEL = 100_000
STEP_MAX_ITEMS = 20_000
"""The library's limits of the work before the first mask and of each, some tens of ms and 1 ms:
less than its own, as other sequences wait meanwhile. Ordinary grammars use a hundredth."""
NO_BYTES = "this model has no tokenizer that says the bytes of its tokens"
NUM_THREADS = 2
"""How many grammars are compiled at a time, so that a slow one does not hold up all others."""


class GrammarCompiler:
    """Compiles grammars for one vocabulary, in threads of its own, and keeps the latest."""

    def __init__(
        self,
        load_tokenizer: Callable[[], Any | None],
        *,
        vocab_size: int,
        end_tokens: tuple[int, ...],
    ) -> None:
        """The vocabulary is read with the first grammar, unless `start_loading` was called before.

        Args:
            load_tokenizer: a tokenizer of transformers or tokenizers; None if there is none.
            vocab_size: tokens that a mask speaks of, those without a text included.
            end_tokens: what may follow a text that the grammar accepts.
        """
        self._vocab_size = vocab_size
        self._end_tokens = end_tokens
        self._load_tokenizer = load_tokenizer
        self._vocabulary: LLTokenizer | InvalidRequestError | None = None
        """What was read, or what is wrong with it."""
        self._loading = threading.Lock()
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")

    def start_loading(self) -> None:
        """Begin to read the vocabulary, so that no request waits for it; returns at once.

        It takes seconds and some 70 MiB where there are 128k tokens.
        """
        self._threads.submit(self._load_vocabulary)  # what is wrong with it is said to who asks

    def compile(self, grammar: Grammar, *, is_shared: bool = True) -> "Future[LLMatcher]":
        """Begin to compile a grammar, unless that was done already; returns at once. One that is
        not shared is compiled for its caller alone.

        The result is a matcher at its start, to be copied and not to be used itself. The future
        raises InvalidRequestError for a grammar that is wrong, too large or too complex.
        """
        if not is_shared:
            return self._threads.submit(self._compile, grammar)
        with self._lock:
            future = self._compiled.get(grammar)
            if future is None:
                future = self._threads.submit(self._compile, grammar)
                self._compiled[grammar] = future
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return future

    def has_begun(self, grammar: Grammar) -> bool:
        """Whether a grammar is compiled, or being compiled."""
        with self._lock:
            return grammar in self._compiled

    def matcher(self, grammar: Grammar) -> OutputMatcher:
        """A matcher for one more output; waits until the grammar is compiled, and raises as that
        does."""
        return self.follow(self.compile(grammar).result())

    def follow(self, compiled: "LLMatcher") -> OutputMatcher:
        """A matcher for one more output of a compiled grammar.

        All of them share what the library has built of the grammar. Where one output has used up
        the limits of that, the grammar is compiled anew for the next.
        """
        return OutputMatcher(
            compiled.deep_copy(),
            self._load_vocabulary(),
            vocab_size=self._vocab_size,
            end_tokens=self._end_tokens,
            on_failure=lambda: self._drop(compiled),
        )

    def _drop(self, compiled: "LLMatcher") -> None:
        with self._lock:
            for grammar, future in list(self._compiled.items()):
                is_made = future.done() and future.exception() is None
                if is_made and future.result() is compiled:
                    del self._compiled[grammar]

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        check_size(grammar)
        vocabulary = self._load_vocabulary()
        limits = LLParserLimits(
            initial_lexer_fuel=LEXER_FUEL,
            step_lexer_fuel=LEXER_FUEL,
            step_max_items=STEP_MAX_ITEMS,
            max_lexer_states=MAX_SOURCE_LEN,  # a list of texts needs one for each character
            verbose_errors=False,
        )
        special_tokens = self._special_tokens(vocabulary, grammar)
        try:
            serialized = serialize(grammar, special_tokens)
        except Exception as error:  # of many kinds, even of none but Exception
            raise _refused(first_line(error)) from None
        matcher = LLMatcher(vocabulary, serialized, limits=limits, log_level=0)
        if matcher.is_error():
            raise _refused(_with_function(vocabulary, grammar) or matcher.get_error())
        try:
            is_possible = any(self.follow(matcher).allowed())
        except GrammarStuckError as error:
            raise _refused(error.reason) from None
        if not is_possible:
            raise _refused("no text fits it")
        return matcher

    def _special_tokens(self, vocabulary: "LLTokenizer", grammar: Grammar) -> dict[str, int]:
        """The ids of those tags that are special tokens, which are no text to the library."""
        tags = _tags(grammar)
        if not tags:
            return {}
        ids = {tag: self._load_tokenizer_backend().token_to_id(tag) for tag in tags}
        return {
            tag: token
            for tag, token in ids.items()
            if token is not None and vocabulary.is_special_token(token)
        }

    def _load_tokenizer_backend(self) -> Any:
        """The `tokenizers` tokenizer inside the model's, or the model's own if it has none."""
        tokenizer = self._load_tokenizer()
        return getattr(tokenizer, "backend_tokenizer", tokenizer)

    def _load_vocabulary(self) -> "LLTokenizer":
        with self._loading:
            if self._vocabulary is None:
                try:
                    self._vocabulary = self._make_vocabulary()
                except InvalidRequestError as error:
                    self._vocabulary = error
        if isinstance(self._vocabulary, InvalidRequestError):
            raise InvalidRequestError(str(self._vocabulary))
        return self._vocabulary

    def _make_vocabulary(self) -> "LLTokenizer":
        """Read the vocabulary; raises InvalidRequestError if no token's bytes are known."""
        from llguidance import LLTokenizer

        backend: Any = self._load_tokenizer_backend()
        if not hasattr(backend, "to_str") or not self._end_tokens:
            raise _refused(
                NO_BYTES if self._end_tokens else "this model names no token that ends a text"
            )
        num_known = max(backend.get_vocab().values()) + 1
        try:
            return LLTokenizer(
                backend.to_str(),
                n_vocab=max(self._vocab_size, num_known),
                eos_token=self._end_tokens[0],
            )
        except Exception as error:  # of a tokenizer whose tokens the library cannot spell
            raise _refused(f"{NO_BYTES} ({first_line(error)})") from None


def check_size(grammar: Grammar) -> None:
    """Raise InvalidRequestError for what would take the library too long, or overflow its stack."""
    if len(grammar.source) > MAX_SOURCE_LEN:
        raise _refused(
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
        raise _refused(f"its brackets are nested {deepest} deep; at most {MAX_DEPTH} are taken")
    multiple = _common_multiple(grammar.source)
    if multiple > MAX_MULTIPLE:
        raise _refused(
            f"its multipleOf have the common multiple {multiple} or more, without zeros at the "
            f"end; at most {MAX_MULTIPLE} is taken"
        )


def _common_multiple(source: str) -> int:
    """The least common multiple of all numbers of `multipleOf`, each without a point and without
    zeros at its end; no further than is too much. Also of a schema within another language."""
    source = ESCAPED.sub(lambda match: chr(int(match[1], 16)), source)
    multiple = 1
    for written in MULTIPLE_OF.findall(source):
        try:
            digits = Decimal(written).as_tuple().digits
        except InvalidOperation:  # no number, as the library will say
            continue
        number = "".join(map(str, digits)).rstrip("0") or "1"
        multiple = math.lcm(multiple, int(number[:20]))  # Python reads no number of 5,000 digits
        if multiple > MAX_MULTIPLE:
            break
    return multiple


def serialize(grammar: Grammar, special_tokens: Mapping[str, int]) -> str:
    """A grammar as the library takes it; raises whatever the library does for one that is wrong."""
    names = {
        tag: f"<[{special_tokens[tag]}]>"
        if tag in special_tokens
        else json.dumps(tag, ensure_ascii=False)
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
    from llguidance.gbnf_to_lark import any_to_lark

    match grammar.kind:
        case "json_schema":
            schema = json.loads(grammar.source)
            return [{"json_schema": schema}]
        case "regex":
            serialized = LLMatcher.grammar_from_regex(grammar.source)
            entry: dict[str, Any] = json.loads(serialized)["grammars"][0]
            return [entry]
        case "choice":
            texts = " | ".join(
                json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.source)
            )
            return [{"lark_grammar": f"start: CHOICE\nCHOICE: {texts}\n"}]
        case "lark":
            return [{"lark_grammar": any_to_lark(grammar.source)}]
        case "tool_calls":
            return ToolCalls.of_source(grammar.source).grammars(names)


def _with_function(vocabulary: "LLTokenizer", grammar: Grammar) -> str | None:
    """Why calls cannot be followed, with the function whose arguments are at fault; None if none
    is."""
    from llguidance import LLMatcher

    if grammar.kind != "tool_calls":
        return None
    for call in ToolCalls.of_source(grammar.source).calls:
        serialized = json.dumps({"grammars": [{"json_schema": call.schema}]})
        matcher = LLMatcher(vocabulary, serialized, log_level=0)
        if matcher.is_error():
            return f"the parameters of {call.function!r}: {matcher.get_error()}"
    return None


def _refused(reason: str) -> InvalidRequestError:
    reason = reason.removesuffix("<non-verbose/>").strip()
    return InvalidRequestError(f"the grammar cannot be used: {reason}")
