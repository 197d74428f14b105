"""A request whose grammar is being compiled waits for it; nothing else does, and nothing spins."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.grammars import compiling_held, save_grammar_model
from tests.workers.decoding import CACHE, SAMPLED
from workers.drafters.model import ModelDrafter
from workers.grammar import Grammar
from workers.grammar_compiler import MAX_COMPILED
from workers.model import Model, load_model
from workers.sampling_params import SamplingParams
from workers.target import Target
from workers.types import ProposeRequest, VerifyRequest

PROMPT = tuple(range(20, 60))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(save_grammar_model(tmp_path_factory.mktemp("m")), dtype="float32")


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Nothing is compiled before it is set."""
    with compiling_held() as gate:
        yield gate


def with_grammar(pattern: str) -> SamplingParams:
    return replace(SAMPLED, grammar=Grammar.regex(pattern))


def verify_request(
    seq_id: str, tokens: tuple[int, ...], sampling: SamplingParams = SAMPLED
) -> VerifyRequest:
    return VerifyRequest(
        seq_id=seq_id,
        base_len=0,
        new_tokens=tokens,
        prompt_len=len(tokens),
        sampling=sampling,
        seed=3,
    )


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:5], PROMPT[:1]], ids=len)
def test_all_but_the_last_token_is_run_meanwhile(
    model: Model, gate: threading.Event, prompt: tuple[int, ...]
) -> None:
    target = Target(model, CACHE)
    is_ready = threading.Event()
    target.on_grammar_ready(is_ready.set)
    target.submit(verify_request("held", prompt, with_grammar("a{9}")))
    target.submit(verify_request("other", PROMPT[:5]))
    results = [result for _ in range(3) for result in target.step()[0]]
    assert [result.seq_id for result in results] == ["other"]
    assert target.num_tokens_run == len(prompt) - 1 + 5
    assert target.step() == ([], False)
    gate.set()
    assert is_ready.wait(timeout=30)
    ((held,), has_run) = target.step()
    assert has_run
    assert target.num_tokens_run == len(prompt) + 5
    (alone,) = Target(model, CACHE).verify([verify_request("x", prompt, with_grammar("a{9}"))])
    assert held.tokens == alone.tokens


def test_who_serves_a_batch_to_its_end_waits(model: Model, gate: threading.Event) -> None:
    threading.Timer(0.2, gate.set).start()
    batch = [
        verify_request("held", PROMPT, with_grammar("a+")),
        verify_request("wrong", PROMPT, with_grammar("(")),
        verify_request("other", PROMPT),
    ]
    held, wrong, other = Target(model, CACHE).verify(batch)
    assert held.tokens
    assert other.tokens
    assert wrong.is_refused


def test_more_grammars_than_are_kept_are_all_served(model: Model, gate: threading.Event) -> None:
    """Grammars that the compiler has forgotten when their turn comes are compiled again."""
    batch = [
        verify_request(f"s{i}", PROMPT[:3], with_grammar(f"a{{{i + 1}}}"))
        for i in range(MAX_COMPILED + 8)
    ]
    target = Target(model, CACHE)
    for request in batch:
        target.submit(request)
        target.step()
    gate.set()
    num_compiled = 0
    compile_ = target._grammars._compiler._compile

    def count(grammar: Grammar) -> object:
        nonlocal num_compiled
        num_compiled += 1
        return compile_(grammar)

    target._grammars._compiler._compile = count  # type: ignore[method-assign, assignment]
    answered: set[str] = set()
    while len(answered) < len(batch):
        answered |= {result.seq_id for result in target.step()[0] if result.tokens}
    assert num_compiled == 0


def test_a_drafter_waits_for_none(model: Model, gate: threading.Event) -> None:
    request = ProposeRequest(
        seq_id="s",
        base_len=0,
        new_tokens=PROMPT,
        prompt_len=len(PROMPT),
        sampling=with_grammar("a{9}"),
        k=3,
    )
    assert not gate.is_set()
    (result,) = ModelDrafter(model, CACHE).propose([request])
    assert len(result.draft_tokens) == 3
