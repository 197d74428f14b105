"""Requests drawn from the schema of the HTTP API: each field's range is the one that it states."""

import math
import random
import string
from collections.abc import Callable, Sequence
from typing import Any, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from deployments.api.completions import CompletionRequest
from tandem.fuzz.structured import draw_conversation, draw_grammar
from workers.types import Rule

Body = dict[str, Any]
"""A request as JSON has it."""

INNOCENT_SEED = 1
MAX_PROMPT = 40
MAX_NEW_TOKENS = 12
ONLY_COMPLETIONS = (
    "prompt",
    "best_of",
    "echo",
    "add_special_tokens",
    "parse_special_tokens",
    "return_tokens_as_token_ids",
)
"""Fields that chats have not."""
# Where floating point breaks: what underflows, overflows, or loses all its digits when it is added.
SMALL = (5e-324, 1e-310, 1e-40, 1e-38, 1e-30, 1e-10, 1e-5, 0.01)
CHOICES_OF_INTEGERS = (
    0,
    1,
    2,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
)
FIELDS = CompletionRequest.model_fields
FLOATS = tuple(name for name, field in FIELDS.items() if field.annotation is float)


def draw_case(rng: random.Random, *, model: str, vocab_size: int) -> Body:
    """A request that the schema allows, or nearly, for completions or for a chat."""
    draw = draw_chat if rng.random() < 0.25 else draw_completion
    body = draw(rng, model=model, vocab_size=vocab_size)
    if rng.random() < 0.2:
        body["max_completion_tokens"] = body.pop("max_tokens")
    return body


def draw_chat(rng: random.Random, *, model: str, vocab_size: int) -> Body:
    """A request for chat completions, with all that it shares with one for completions."""
    body = draw_completion(rng, model=model, vocab_size=vocab_size)
    for name in ONLY_COMPLETIONS:
        body.pop(name, None)
    if "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    return body | draw_conversation(rng)


def draw_completion(rng: random.Random, *, model: str, vocab_size: int) -> Body:
    """A request for completions: most fields at an edge of what they may be."""
    max_tokens = rng.randint(1, MAX_NEW_TOKENS)
    body: Body = {
        "model": model,
        "prompt": _draw_prompts(rng, vocab_size),
        "max_tokens": max_tokens,
        "seed": _draw_integer(rng, FIELDS["seed"]),
    }
    for name in FLOATS:
        if rng.random() < 0.5:
            body[name] = _draw_float(rng, FIELDS[name])
    rare: dict[str, Callable[[], Any]] = {
        "top_k": lambda: _draw_top_k(rng, vocab_size),
        "logit_bias": lambda: _draw_bias(rng, vocab_size),
        "n": lambda: rng.choice([1, 2, 3]),
        "stop": lambda: _draw_stop(rng),
        "ignore_eos": lambda: rng.random() < 0.5,
        "cache_salt": lambda: rng.choice(["", "a", "\x00", "é" * 256]),
        "stream": lambda: rng.random() < 0.5,
        "stream_options": lambda: _draw_stream_options(rng) if body.get("stream") else None,
        "min_tokens": lambda: rng.choice([0, 1, max_tokens, 2**31 - 1]),
        "stop_token_ids": lambda: rng.sample(range(vocab_size), rng.choice([1, 20, 64])),
        "bad_words": lambda: rng.choice([["a"], ["the", " ", "zz"], list("abcdefgh")]),
        "include_stop_str_in_output": lambda: rng.random() < 0.5,
        "skip_special_tokens": lambda: rng.random() < 0.5,
        "logprobs": lambda: rng.choice([0, 1, 20]),
        "prompt_logprobs": lambda: rng.choice([0, 20]),
        "echo": lambda: rng.random() < 0.5,
        "best_of": lambda: body.get("n", 1) + (0 if body.get("stream") else rng.choice([0, 1, 2])),
        "return_token_ids": lambda: rng.random() < 0.5,
        "return_tokens_as_token_ids": lambda: rng.random() < 0.5,
        "priority": lambda: _draw_integer(rng, FIELDS["priority"]),
        "add_special_tokens": lambda: rng.random() < 0.5,
        "parse_special_tokens": lambda: rng.random() < 0.5,
        "speculation": lambda: _draw_speculation(rng),
        "prediction": lambda: _draw_prediction(rng),
        "user": lambda: "u",
    }
    for name, draw in rare.items():
        if rng.random() < 0.3:
            body[name] = draw()
    if (body.get("speculation") or {}).get("mode") == "predicted":
        body.setdefault("prediction", rare["prediction"]())
    return body | draw_grammar(rng) if rng.random() < 0.2 else body


def innocent_case(model: str, index: int) -> Body:
    """A request whose answer nothing may change, whatever runs beside it."""
    return {
        "model": model,
        "prompt": [3 + index, 7, 11, 5, 13],
        "max_tokens": 2 * MAX_NEW_TOKENS,
        "temperature": 0.8 * (index % 2),
        "seed": INNOCENT_SEED + index,
        "ignore_eos": True,
        "cache_salt": "innocent",
    }


def _limits(field: FieldInfo) -> tuple[float | None, float | None]:
    """The lowest and the highest number that a field allows, by its own constraints."""
    low: Any = None
    high: Any = None
    is_whole = field.annotation in (int, int | None)

    def beside(limit: Any, direction: int) -> Any:
        return limit + direction if is_whole else math.nextafter(limit, direction * math.inf)

    for limit in field.metadata:
        match limit:
            case Ge():
                low = limit.ge
            case Gt():
                low = beside(limit.gt, 1)
            case Le():
                high = limit.le
            case Lt():
                high = beside(limit.lt, -1)
    return low, high


def _draw_float(rng: random.Random, field: FieldInfo) -> float:
    low, high = _limits(field)
    assert low is not None, "an unbounded number needs bounds in the schema"
    assert high is not None
    candidates = [low, high, math.nextafter(low, high), math.nextafter(high, low), 0.0, 1.0]
    candidates += [number for small in SMALL for number in (small, -small, 1.0 - small)]
    legal = [number for number in candidates if low <= number <= high]
    if rng.random() < 0.3:
        return rng.uniform(low, high)
    return rng.choice(legal)


def _draw_integer(rng: random.Random, field: FieldInfo) -> int:
    low, high = _limits(field)
    candidates = [*CHOICES_OF_INTEGERS, *(-number for number in CHOICES_OF_INTEGERS)]
    if low is not None:
        candidates += [int(low), int(low) + 1]
    if high is not None:
        candidates += [int(high), int(high) - 1]
    legal = [
        number
        for number in candidates
        if (low is None or number >= low) and (high is None or number <= high)
    ]
    return rng.choice(legal)


def _draw_top_k(rng: random.Random, vocab_size: int) -> int:
    if rng.random() < 0.7:
        return rng.choice([1, 2, vocab_size - 1, vocab_size, vocab_size + 1])
    return _draw_integer(rng, FIELDS["top_k"])


def _draw_bias(rng: random.Random, vocab_size: int) -> dict[str, float]:
    """Biases on few tokens, among them the last; or on nearly all of them, or on all."""
    kinds = (
        [vocab_size - 1],
        rng.sample(range(vocab_size), 5),
        range(1, vocab_size),
        range(vocab_size),
        (),
    )
    (tokens,) = rng.choices(kinds, weights=(4, 4, 1, 1, 1))
    limit = rng.choice((-100.0, 100.0, None))
    return {str(token): rng.uniform(-100, 100) if limit is None else limit for token in tokens}


def _draw_speculation(rng: random.Random) -> Any:
    modes: list[Body] = [
        {"mode": mode}
        for mode in ("off", "model", "prompt_lookup", "suffix", "early_exit", "predicted")
    ]
    rules = [{"verification": rule} for rule in get_args(Rule)]
    return rng.choice([*modes, {"num_speculative_tokens": 1}, {}, *rules])


def _draw_stream_options(rng: random.Random) -> Body:
    names = ("include_usage", "continuous_usage_stats")
    return {name: rng.random() < 0.5 for name in names}


def _draw_prediction(rng: random.Random) -> Any:
    """A prediction of nothing, of anything, or of more than fits a context."""
    text = "".join(rng.choices(string.printable[:95], k=rng.choice([1, *[40] * 12, 400])))
    parts = [{"type": "text", "text": text}, {"type": "text", "text": ""}]
    return {"type": "content", "content": rng.choice(["", text, parts, []])}


def _draw_stop(rng: random.Random) -> Any:
    letters = string.ascii_letters + string.punctuation + " \n"
    short = ["".join(rng.choices(letters, k=rng.randint(1, 2))) for _ in range(16)]
    return rng.choice([short, short[0], short[:3], [" " * 1000], ["\x00"], None])


def _draw_prompts(rng: random.Random, vocab_size: int) -> Any:
    def ids() -> list[int]:
        edges = [0, 1, 2, vocab_size - 2, vocab_size - 1]
        ids = edges if rng.random() < 0.3 else range(vocab_size)
        return rng.choices(ids, k=rng.choice([1, 2, 15, 16, 17, MAX_PROMPT]))

    def text() -> str:
        return "".join(rng.choices(string.printable[:95], k=rng.randint(1, MAX_PROMPT)))

    kinds: Sequence[Callable[[], Any]] = (
        ids,
        text,
        lambda: [ids(), ids()],
        lambda: [text(), ids()],
    )
    return rng.choices(kinds, (6, 3, 1, 1))[0]()
