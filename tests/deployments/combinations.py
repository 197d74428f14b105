"""What is tried together: every field of a request, with every kind of drafter and draft length.

`test_combinations` runs all of it, and a table of docs/exactness.md is written from it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from deployments.api.chat import ChatCompletionRequest
from deployments.api.completions import CompletionRequest
from tests.grammars import ARITHMETIC, END_TOKEN, PERSON

Gamma = int | Literal["dynamic"]
Request = CompletionRequest | ChatCompletionRequest
Case = tuple[str, str, int]
"""A feature, how tokens are chosen, and which prompt."""
Requests = dict[Case, Request]

PROMPTS = ["x", "def f(a, b): return a + b # " * 2]
NUM_TOKENS = 12
"""The most tokens of a completion."""
MIN_TOKENS = 9
"""The least, where a feature has it so."""

DRAFTERS = ("model", "prompt_lookup", "suffix", "early_exit", "suffix,model")
GAMMAS: tuple[Gamma, ...] = (0, 8, "dynamic")
TRIED: Mapping[str, Sequence[Gamma]] = {
    **{f"drafter={name}": GAMMAS for name in DRAFTERS},
    **{f"heterogeneous_vocab={method}": (8,) for method in ("intersection", "retokenize")},
}
"""The draft lengths tried with each option; the last ones with a draft model of other tokens."""

GREEDY = {"temperature": 0}
SAMPLED = {"temperature": 0.8}
FREQUENT = "eatoinshrdlu"
"""Characters that are tokens of the tests' tokenizer, beside all other bytes."""
PREDICTION = "the cat and the dog and the cat and a b"
STOP_TOKENS = list(range(3, 97, 8))
LIKELY_END = {"logit_bias": {str(END_TOKEN): 3.0}}
"""A bias by which texts end by themselves, as few texts of random models do."""
ALL_SAMPLING = {
    "top_p": 0.9,
    "top_k": 30,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.1,
    "logit_bias": {"40": 1.5},
    "bad_words": ["t", "ab"],
    "min_tokens": 8,
    "stop_token_ids": STOP_TOKENS,
}
ALL_AT_ONCE = {
    **ALL_SAMPLING,
    "stop": list(FREQUENT),
    "include_stop_str_in_output": True,
    "logprobs": 5,
    "prompt_logprobs": 2,
    "echo": True,
    "n": 2,
}

TOOLS = [
    {"type": "function", "function": {"name": "store", "parameters": PERSON}},
    {"type": "function", "function": {"name": "stop"}},
]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{{ tools | length }}{{ '<think>' if thinks }}{# </think> <tool_call> #}"
)

FEATURES: dict[str, dict[str, Any]] = {
    "no field but temperature": {},
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 8},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "logit_bias": {"logit_bias": {"40": 4.0, "41": -100}},
    "seed": {"seed": -5},
    "stop": {"stop": list(FREQUENT)},
    "include_stop_str_in_output": {
        "stop": list(FREQUENT),
        "stop_token_ids": STOP_TOKENS,
        "include_stop_str_in_output": True,
    },
    "stop_token_ids": {"stop_token_ids": STOP_TOKENS},
    "min_tokens": {"min_tokens": MIN_TOKENS, "stop_token_ids": STOP_TOKENS, "stop": list(FREQUENT)},
    "bad_words": {"bad_words": [*FREQUENT, "ab", "xyz", '"!']},
    "logit_bias of the end of a text": LIKELY_END,
    "ignore_eos": {**LIKELY_END, "ignore_eos": True},
    "max_tokens": {"max_tokens": 1},
    "max_tokens of 0, with echo": {"max_tokens": 0, "echo": True, "logprobs": 1},
    "n": {"n": 3},
    "best_of": {"n": 2, "best_of": 4},
    "echo": {"echo": True},
    "logprobs": {"logprobs": 5},
    "prompt_logprobs": {"prompt_logprobs": 5},
    "echo with logprobs": {"echo": True, "logprobs": 1, "max_tokens": 1},
    "return_token_ids": {"return_token_ids": True},
    "skip_special_tokens": {**LIKELY_END, "ignore_eos": True, "skip_special_tokens": False},
    "cache_salt": {"cache_salt": "s"},
    "speculation.mode": {"speculation": {"mode": "off"}},
    "speculation.num_speculative_tokens": {"speculation": {"num_speculative_tokens": 2}},
    "prediction": {"prediction": {"type": "content", "content": PREDICTION}},
    "prediction with speculation.mode": {
        "prediction": {"type": "content", "content": [{"type": "text", "text": PREDICTION}]},
        "speculation": {"mode": "predicted"},
    },
    "speculation.verification of rejection": {"speculation": {"verification": "rejection"}},
    "speculation.verification of block, with the sampling parameters": {
        **ALL_SAMPLING,
        "speculation": {"verification": "block"},
    },
    "all of these at once": ALL_AT_ONCE,
    "response_format": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    },
    "structured_outputs": {"structured_outputs": {"json_object": True}},
    "guided_json": {"guided_json": PERSON},
    "guided_regex": {"guided_regex": "(ab|cd)+-[0-9]{2,9}"},
    "guided_choice": {"guided_choice": ["red", "redder", "grün"]},
    "guided_grammar": {"guided_grammar": ARITHMETIC},
    "guided_regex with logprobs, n and penalties": {
        "guided_regex": "[a-e]{8,30}",
        "logprobs": 3,
        "n": 2,
        "frequency_penalty": 1.0,
    },
    "tool_choice": {"tools": TOOLS, "tool_choice": "required"},
    "tool_choice of a function, with logprobs and n": {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "store"}},
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
    },
    "tool_choice with thoughts": {
        "tools": TOOLS,
        "tool_choice": "required",
        "chat_template_kwargs": {"thinks": True},
    },
}
"""The fields of each; those with `tools` are of a chat, with the prompt as its message."""
UNDRAFTED = frozenset(
    {"max_tokens", "max_tokens of 0, with echo", "echo with logprobs", "speculation.mode"}
)
"""The features whose requests have no drafts: the last token needs none."""


def request(prompt: str, **fields: Any) -> Request:
    if "tools" not in fields:
        return CompletionRequest.model_validate({"prompt": prompt, **fields})
    message = {"role": "user", "content": prompt}
    return ChatCompletionRequest.model_validate({"messages": [message], **fields})


def requests() -> Requests:
    """Each feature with each prompt, greedy and sampled."""
    return {
        (name, word, index): request(
            prompt, **{"max_tokens": NUM_TOKENS, "seed": 3 + index, **way, **fields}
        )
        for name, fields in FEATURES.items()
        for word, way in {"greedy": GREEDY, "sampled": SAMPLED}.items()
        for index, prompt in enumerate(PROMPTS)
    }


def some_requests(turn: int, gamma: Gamma) -> Requests:
    """A greedy and a sampled request for each feature, of two prompts, or one of both where nothing
    is drafted; turns take others."""
    positions = {name: position + turn for position, name in enumerate(FEATURES)}
    return {
        (name, word, index): request
        for (name, word, index), request in requests().items()
        if index == (positions[name] + (word == "sampled")) % len(PROMPTS)
        and (gamma != 0 or (word == "sampled") == positions[name] // len(PROMPTS) % 2)
    }


def has_one_text(feature: str, way: str) -> bool:
    """Whether a text is that of its seed: drawn ones are not under rules that compare laws."""
    rule = FEATURES[feature].get("speculation", {}).get("verification", "coupled")
    return rule == "coupled" or way == "greedy"


def combinations() -> list[tuple[str, ...]]:
    """A row for each feature: its name, then the draft lengths of each column of TRIED."""
    cells = [", ".join(map(str, gammas)) for gammas in TRIED.values()]
    return [(f"`{name}`" if name.isidentifier() else name, *cells) for name in FEATURES]
