"""Fields of OpenAI's and vLLM's that are not served, with the values of each that ask for nothing.

Many clients send every field that they know, most of them switched off. Such a field is left out;
a value that would have to change the answer is refused, never silently ignored. `null` asks for
nothing in any field.
"""

import json
from collections.abc import Mapping
from typing import Any

ANYTHING = object()
"""Stands for every value: the field never changes an answer."""

OffValues = Mapping[str, tuple[Any, ...]]

COMPLETIONS: OffValues = {
    "add_special_tokens": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "detokenize": (True,),
    "echo": (False,),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logprobs": (),
    "max_completion_tokens": (),
    "metadata": (ANYTHING,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "priority": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "request_id": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "safety_identifier": (ANYTHING,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
STREAM_OPTIONS: OffValues = {"include_obfuscation": (False,)}


def asks_for_nothing(value: Any, off_values: tuple[Any, ...]) -> bool:
    return value is None or any(off is ANYTHING or _is_same(value, off) for off in off_values)


def how_to_leave_out(off_values: tuple[Any, ...]) -> str:
    """The advice to a client that uses a field which is not served."""
    shown = " or ".join(json.dumps(off) for off in off_values)
    return f"leave it out or send {shown}" if shown else "leave it out"


def _is_same(value: Any, off: Any) -> bool:
    """Equal, where true and 1 are two things, as in JSON."""
    return isinstance(value, bool) == isinstance(off, bool) and bool(value == off)
