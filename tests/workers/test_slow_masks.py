"""Masks that take long are made in a thread: they hold up their own sequence and no other."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from tests.grammars import PERSON, save_grammar_model
from tests.workers.decoding import CACHE, generate, knowing_drafts
from tests.workers.test_grammar import ids, make_compiler
from tests.workers.test_waiting_for_grammars import PROMPT, verify_request
from workers import grammar_masks, grammar_matcher
from workers.errors import GrammarStuckError
from workers.grammar import Grammar
from workers.grammar_masks import GrammarMasks
from workers.grammar_matcher import OutputMatcher
from workers.model import Model, load_model
from workers.sampling_params import SamplingParams
from workers.target import Target
from workers.types import VerifyRequest

NUM_TOKENS = 40
SCHEMA = SamplingParams(temperature=1.0, grammar=Grammar.json_schema(PERSON))
DIGITS = SamplingParams(temperature=1.0, grammar=Grammar.regex("[0-9]+"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(save_grammar_model(tmp_path_factory.mktemp("m")), dtype="float32")


@pytest.fixture
def always_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any mask counts as slow."""
    monkeypatch.setattr(grammar_matcher, "SLOW_S", 0.0)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No thread makes a mask before it is set; steps do."""
    gate = threading.Event()
    next_ = grammar_masks._next

    def wait(matcher: OutputMatcher, output: Sequence[int]) -> object:
        if threading.current_thread() is not threading.main_thread():
            assert gate.wait(timeout=30)
        return next_(matcher, output)

    monkeypatch.setattr(grammar_masks, "_next", wait)
    yield gate
    gate.set()


def next_request(request: VerifyRequest, tokens: Sequence[int]) -> VerifyRequest:
    """The request of the round after, in which these tokens were committed."""
    cached_len = request.base_len + len(request.new_tokens)
    return replace(request, base_len=cached_len, new_tokens=tuple(tokens))


def truth(model: Model, sampling: SamplingParams) -> list[int]:
    """The first two tokens behind the prompt."""
    return generate(Target(model, CACHE), PROMPT, 2, sampling=sampling, seed=3)


@pytest.mark.parametrize("wrong_every", [2, 1000])
def test_texts_do_not_depend_on_where_masks_are_made(
    model: Model, monkeypatch: pytest.MonkeyPatch, wrong_every: int
) -> None:
    expected = generate(Target(model, CACHE), PROMPT, NUM_TOKENS, sampling=SCHEMA)
    monkeypatch.setattr(grammar_matcher, "SLOW_S", 0.0)
    drafts = knowing_drafts(expected, len(PROMPT), 4, wrong_every)
    for more in ({}, {"drafts": drafts}, {"drafts": drafts, "forget_every": 3}):
        target = Target(model, CACHE)
        assert generate(target, PROMPT, NUM_TOKENS, sampling=SCHEMA, **more) == expected


@pytest.mark.usefixtures("always_slow")
def test_others_are_served_meanwhile(model: Model, gate: threading.Event) -> None:
    target = Target(model, CACHE)
    is_ready = threading.Event()
    target.on_grammar_ready(is_ready.set)
    first, other = verify_request("slow", PROMPT, DIGITS), verify_request("other", PROMPT)
    result, plain = target.verify([first, other])
    assert (result.has_slow_masks, plain.has_slow_masks) == (True, False)
    second = next_request(first, result.tokens)
    target.submit(second)
    target.submit(next_request(other, plain.tokens))
    assert [result.seq_id for result in target.step()[0]] == ["other"]
    assert target.step() == ([], False)
    is_ready.clear()  # what told that the grammar was compiled
    gate.set()
    assert is_ready.wait(timeout=30)
    ((slow,), _) = target.step()
    assert [*result.tokens, *slow.tokens] == truth(model, DIGITS)


def test_a_long_text_that_comes_back_is_matched_beside_the_steps(
    model: Model, gate: threading.Event
) -> None:
    """As of one that was suspended, or whose worker was lost."""
    expected = generate(Target(model, CACHE), PROMPT, 100, sampling=DIGITS, seed=3)
    target = Target(model, CACHE)
    is_ready = threading.Event()
    target.on_grammar_ready(is_ready.set)
    target.verify([verify_request("first", PROMPT, DIGITS)])  # compiles
    back = verify_request("back", PROMPT, DIGITS)
    target.submit(replace(back, new_tokens=(*PROMPT, *expected[:99])))
    target.submit(verify_request("other", PROMPT[:5]))
    results = [result for _ in range(4) for result in target.step()[0]]
    assert [result.seq_id for result in results] == ["other"]
    is_ready.clear()
    gate.set()
    assert is_ready.wait(timeout=30)
    ((result,), _) = target.step()
    assert [*result.tokens] == expected[99:]
    assert not result.has_slow_masks


@pytest.mark.usefixtures("always_slow")
def test_a_mask_of_tokens_that_were_taken_back_is_not_used(
    model: Model, gate: threading.Event
) -> None:
    target = Target(model, CACHE)
    first = verify_request("s", PROMPT, SCHEMA)
    (result,) = target.verify([first])
    target.submit(next_request(first, (40, 41)))  # which the grammar forbids
    target.step()
    target.submit(next_request(first, result.tokens))
    assert target.step() == ([], False)
    gate.set()
    deadline = time.monotonic() + 30
    while not (answers := target.step()[0]) and time.monotonic() < deadline:
        time.sleep(0.01)
    (second,) = answers
    assert [*result.tokens, *second.tokens] == truth(model, SCHEMA)


@pytest.mark.usefixtures("always_slow")
def test_a_step_waits_for_a_mask_of_other_tokens(gate: threading.Event) -> None:
    """No two threads use a match at a time, and what the other one made is of no use."""
    masks, grammar = GrammarMasks(make_compiler()), Grammar.regex("[0-9]{3}-[0-9]+")

    class Text:
        tokens: Sequence[int] = ids("12")

    def next_mask(text: Text) -> list[int]:
        masks.wait(text, grammar)
        (mask,) = masks.after_each(text, grammar, prompt_len=0, num_drafts=0)
        assert mask is not None
        return mask.tolist()

    expected, text = next_mask(Text()), Text()
    next_mask(text)
    assert not masks.has_next(text, grammar, remaining=ids("3"), prompt_len=0)
    threading.Timer(0.2, gate.set).start()
    (mask,) = masks.after_each(text, grammar, prompt_len=0, num_drafts=0)
    assert gate.is_set()
    assert mask is not None
    assert mask.tolist() == expected


@pytest.mark.usefixtures("always_slow")
def test_who_is_stuck_meanwhile_is_told_so(model: Model) -> None:
    target = Target(model, CACHE)
    first = verify_request("s", PROMPT, DIGITS)
    (result,) = target.verify([first])
    forbidden = next_request(first, (*result.tokens, 40))
    (again,) = target.verify([forbidden])
    assert again.needs_tokens_from == 0
    whole = replace(first, new_tokens=(*PROMPT, *forbidden.new_tokens))
    (stuck,) = target.verify([whole])
    assert stuck.is_refused
    assert "cannot be followed any further" in stuck.error


def make_matcher(clock: Callable[[], float]) -> OutputMatcher:
    matcher = make_compiler().matcher(Grammar.regex("a+"))
    matcher._clock = clock
    return matcher


@pytest.mark.parametrize("factor", [1.1, 1.9])
def test_a_text_that_takes_too_long_to_match_ends(factor: float) -> None:
    """Each token takes `factor` times SLOW_S."""
    now, tick = 0.0, 0.0

    def clock() -> float:
        nonlocal now
        now += tick
        return now

    matcher = make_matcher(clock)
    (token,) = ids("a")
    for _ in range(1000):  # which make up for nothing behind them
        assert matcher.push(token)
    tick = factor * grammar_matcher.SLOW_S
    most = grammar_matcher.MOST_MATCHING_S / grammar_matcher.SLOW_S / (factor - 1.0)
    for _ in range(math.floor(most)):
        assert matcher.push(token)
    with pytest.raises(GrammarStuckError, match="so ambiguous"):
        matcher.move_to([token] * (math.floor(most) + 1002))
    for use in (matcher.push, lambda token: matcher.move_to([token])):
        num_before, now = now, now
        with pytest.raises(GrammarStuckError, match="so ambiguous"):
            use(token)
        assert now == num_before  # nothing was matched


def test_a_sequence_is_slow_until_it_has_made_up_for_a_long_mask() -> None:
    now = 0.0
    matcher = make_matcher(lambda: now)
    assert not matcher.is_slow
    with matcher.timed():
        matcher.allowed()
        now += 2.5 * grammar_matcher.SLOW_S
    assert matcher.is_slow
    for num_masks in (2, 3):
        with matcher.timed():
            matcher.allowed()
        assert matcher.is_slow == (num_masks < 3)


def test_a_text_that_took_too_long_is_not_tried_again(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlike one that met a limit that others may have used up."""
    target = Target(model, CACHE)
    first = verify_request("s", PROMPT, DIGITS)
    (result,) = target.verify([first])
    monkeypatch.setattr(grammar_matcher, "MOST_MATCHING_S", -1.0)
    (refused,) = target.verify([next_request(first, result.tokens)])
    assert refused.is_refused
    assert "so ambiguous" in refused.error
