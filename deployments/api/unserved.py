"""Fields of OpenAI's and vLLM's that are not served, with the values of each that ask for nothing.

Many clients send every field that they know, most of them switched off. Such a field is left out;
a value that would have to change the answer is refused, never silently ignored. `null` asks for
nothing in any field. A field that stands neither here nor among those that are served is left out
too, unless its name is nearly one of these: a misspelt `temprature` must not silently sample at 1.
"""

import difflib
import json
from collections.abc import Collection, Mapping
from typing import Any

ANYTHING = object()
"""Stands for every value: the field never changes an answer."""
LIKENESS = 0.8
"""How like two names are, by difflib's ratio, of which one may be the other misspelt."""
MAX_NAME_LENGTH = 64

OffValues = Mapping[str, tuple[Any, ...]]

COMPLETIONS: OffValues = {
    "allowed_token_ids": (),
    "detokenize": (True,),
    "do_sample": (True,),
    "dry_multiplier": (0,),
    "functions": ([],),
    "guided_decoding_backend": (ANYTHING,),
    "guided_whitespace_pattern": (),
    "length_penalty": (1,),
    "max_new_tokens": (),
    "metadata": (ANYTHING,),
    "mirostat": (0,),
    "modalities": (["text"],),
    "n_predict": (),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "parallel_tool_calls": (True, False),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "request_id": (ANYTHING,),
    "safety_identifier": (ANYTHING,),
    "service_tier": (ANYTHING,),
    "spaces_between_special_tokens": (True,),
    "store": (ANYTHING,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_a": (0,),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
}
CHAT: OffValues = {
    **COMPLETIONS,
    "add_special_tokens": (False,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_content_format": ("auto", "string"),
    "documents": ([],),
    "echo": (False,),
    "enable_thinking": (),
    "function_call": ("none", "auto"),
    "include_reasoning": (True,),
    "parse_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True,),
    "verbosity": (),
    "web_search_options": (),
}
TOKENIZE: OffValues = {
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "reasoning_effort": (),
    "tool_choice": ("auto",),
}
STREAM_OPTIONS: OffValues = {"include_obfuscation": (False,)}


def asks_for_nothing(value: Any, off_values: tuple[Any, ...]) -> bool:
    return value is None or any(off is ANYTHING or _is_same(value, off) for off in off_values)


def near_miss(name: str, known: Collection[str]) -> str | None:
    """The known field that a client may have meant by another name; None if it is none of them."""
    if len(name) > MAX_NAME_LENGTH:
        return None
    spelt = name.lower().replace("-", "_")
    return next(iter(difflib.get_close_matches(spelt, known, n=1, cutoff=LIKENESS)), None)


def how_to_leave_out(off_values: tuple[Any, ...]) -> str:
    """The advice to a client that uses a field which is not served."""
    shown = " or ".join(json.dumps(off) for off in off_values)
    return f"leave it out or send {shown}" if shown else "leave it out"


def _is_same(value: Any, off: Any) -> bool:
    """Equal, where true and 1 are two things, as in JSON."""
    return isinstance(value, bool) == isinstance(off, bool) and bool(value == off)
