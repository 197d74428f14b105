"""Fields of other servers' requests that are not served: which of their values ask for nothing, and
what to send instead.

Many clients send every field that they know, most of them switched off. Such a field is left out;
a value that would have to change the answer is refused, never silently ignored. `null` asks for
nothing in any field. A field that stands neither here nor among those that are served is left out
too, unless its name is nearly one of these: a misspelt `temprature` must not silently sample at 1.
The names are those of OpenAI, vLLM, SGLang, TGI, transformers, llama.cpp, Ollama, Together, Mistral
and Anthropic.
"""

import difflib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

ANYTHING = object()
"""Stands for every value: the field never changes an answer."""
LIKENESS = 0.8
"""How like two names are, by difflib's ratio, of which one may be the other misspelt."""
MAX_NAME_LENGTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Unserved:
    """A field that is not served."""

    off: tuple[Any, ...] = ()
    """The field's values that ask for nothing."""
    instead: str = ""
    """What to use in its place: a field, or a few words. Empty where there is nothing."""

    def asks_for_nothing(self, value: Any) -> bool:
        return value is None or any(off is ANYTHING or _is_same(value, off) for off in self.off)

    def taken(self) -> str:
        """The values that ask for nothing, in words; empty for none."""
        return " or ".join("any" if off is ANYTHING else json.dumps(off) for off in self.off)

    def advice(self) -> str:
        """What a client is told that uses it."""
        advice = f"leave it out or send {self.taken()}" if self.off else "leave it out"
        return f"{advice}, and use {self.instead} in its place" if self.instead else advice


UnservedFields = Mapping[str, Unserved]

NEVER_OFF = Unserved()
IGNORED = Unserved(off=(ANYTHING,))
"""It changes no text by itself, though its name is near to one that does."""
MAX_TOKENS = Unserved(instead="max_tokens")
MIN_TOKENS = Unserved(off=(0,), instead="min_tokens")
LOGPROBS = Unserved(off=(0,), instead="logprobs")
STOP = Unserved(off=([],), instead="stop")
ITSELF = Unserved(off=({},), instead="fields of the request itself")
GRAMMAR = "structured_outputs.grammar"
SYSTEM = "a message of the role system"
TEMPLATE = Unserved(instead="chat_template_kwargs")
NUM_DRAFTS = Unserved(instead="speculation.num_speculative_tokens")

COMPLETIONS: UnservedFields = {
    "adapter_id": NEVER_OFF,
    "adaptive_target": Unserved(off=(-1,)),
    "allowed_token_ids": NEVER_OFF,
    "bad_words_ids": Unserved(off=([],), instead="bad_words"),
    "ban_eos_token": Unserved(off=(False,), instead="ignore_eos"),
    "begin_suppress_tokens": Unserved(off=([],)),
    "custom_logit_processor": NEVER_OFF,
    "detokenize": Unserved(off=(True,), instead="return_token_ids"),
    "guided_decoding_disable_any_whitespace": Unserved(
        off=(False,), instead="structured_outputs.disable_any_whitespace"
    ),
    "disable_any_whitespace": Unserved(
        off=(False,), instead="structured_outputs.disable_any_whitespace"
    ),
    "do_sample": Unserved(off=(True,), instead="temperature 0"),
    "drafter": Unserved(instead="speculation.mode"),
    "dry_multiplier": Unserved(off=(0,)),
    "dynatemp_range": Unserved(off=(0,)),
    "ebnf": Unserved(instead=GRAMMAR),
    "encoder_repetition_penalty": Unserved(off=(1,)),
    "eos_token_id": Unserved(instead="stop_token_ids"),
    "epsilon_cutoff": Unserved(off=(0,)),
    "eta_cutoff": Unserved(off=(0,)),
    "exponential_decay_length_penalty": NEVER_OFF,
    "extra_body": ITSELF,
    "forced_bos_token_id": NEVER_OFF,
    "forced_eos_token_id": NEVER_OFF,
    "format": Unserved(off=("",), instead="response_format"),
    "functions": Unserved(off=([],), instead="tools of a chat"),
    "gamma": NUM_DRAFTS,
    "grammar": Unserved(off=("",), instead=GRAMMAR),
    "guidance_scale": Unserved(off=(1,)),
    "guided_decoding": Unserved(off=({},), instead="structured_outputs"),
    "guided_decoding_backend": IGNORED,
    "guided_whitespace_pattern": Unserved(instead="structured_outputs.whitespace_pattern"),
    "json_schema": Unserved(instead="structured_outputs.json"),
    "length_penalty": Unserved(off=(1,)),
    "logits_processors": Unserved(off=([],)),
    "logprob_token_ids": Unserved(off=([],), instead="logprobs"),
    "lora": Unserved(off=([],)),
    "lora_path": NEVER_OFF,
    "lora_request": NEVER_OFF,
    "max_length": MAX_TOKENS,
    "max_new_tokens": MAX_TOKENS,
    "max_output_tokens": MAX_TOKENS,
    "max_tokens_to_sample": MAX_TOKENS,
    "messages": Unserved(off=([],), instead="/v1/chat/completions"),
    "metadata": IGNORED,
    "min_keep": Unserved(off=(0,)),
    "min_length": MIN_TOKENS,
    "min_new_tokens": MIN_TOKENS,
    "mirostat": Unserved(off=(0,)),
    "mirostat_eta": IGNORED,
    "mirostat_tau": IGNORED,
    "modalities": Unserved(off=(["text"],)),
    "n_indent": Unserved(off=(0,)),
    "n_keep": IGNORED,
    "n_predict": MAX_TOKENS,
    "n_probs": LOGPROBS,
    "no_repeat_ngram_size": Unserved(off=(0,)),
    "no_stop_trim": Unserved(off=(False,), instead="include_stop_str_in_output"),
    "num_beam_groups": Unserved(off=(1,)),
    "num_beams": Unserved(off=(1,)),
    "num_predict": MAX_TOKENS,
    "num_return_sequences": Unserved(off=(1,), instead="n"),
    "num_speculative_tokens": NUM_DRAFTS,
    "nvext": ITSELF,
    "options": ITSELF,
    "parallel_tool_calls": Unserved(off=(True, False)),
    "parameters": ITSELF,
    "penalty_alpha": Unserved(off=(0,)),
    "prompt_embeds": NEVER_OFF,
    "random_seed": Unserved(instead="seed"),
    "reasoning_effort": Unserved(instead="/v1/chat/completions"),
    "regex": Unserved(instead="structured_outputs.regex"),
    "repeat_last_n": Unserved(off=(-1,)),
    "repeat_penalty": Unserved(off=(1,), instead="repetition_penalty"),
    "repetition_detection": NEVER_OFF,
    "request_id": Unserved(off=(ANYTHING,), instead="the header x-request-id"),
    "return_full_text": Unserved(off=(False,), instead="echo"),
    "return_hidden_states": Unserved(off=(False,)),
    "return_tokens": Unserved(off=(False,), instead="return_token_ids"),
    "safe_prompt": Unserved(off=(False,)),
    "safety_identifier": IGNORED,
    "safety_model": Unserved(off=("",)),
    "samplers": NEVER_OFF,
    "sampling_params": ITSELF,
    "sequence_bias": Unserved(off=({}, []), instead="logit_bias"),
    "service_tier": IGNORED,
    "session_params": Unserved(off=({},)),
    "smoothing_factor": Unserved(off=(0,)),
    "spaces_between_special_tokens": Unserved(off=(True,)),
    "stop_regex": Unserved(off=([],)),
    "stop_sequences": STOP,
    "stop_strings": STOP,
    "store": IGNORED,
    "structural_tag": NEVER_OFF,
    "suffix": Unserved(off=("",)),
    "suppress_tokens": Unserved(off=([],), instead="logit_bias of -100"),
    "system": Unserved(off=("", []), instead="prompt"),
    "system_prompt": Unserved(off=("",), instead="prompt"),
    "t_max_predict_ms": Unserved(off=(0,)),
    "temperature_last": Unserved(off=(False,)),
    "tfs_z": Unserved(off=(1,)),
    "thinking_token_budget": NEVER_OFF,
    "tool_choice": Unserved(off=("none", "auto"), instead="/v1/chat/completions"),
    "tools": Unserved(off=([],), instead="/v1/chat/completions"),
    "top_a": Unserved(off=(0,)),
    "top_logprobs": LOGPROBS,
    "top_n_sigma": Unserved(off=(-1, 0)),
    "top_n_tokens": LOGPROBS,
    "truncate": NEVER_OFF,
    "truncate_prompt_tokens": NEVER_OFF,
    "typical_p": Unserved(off=(1,)),
    "use_beam_search": Unserved(off=(False,)),
    "verification": Unserved(instead="speculation.verification"),
    "vllm_xargs": Unserved(off=({},)),
    "watermark": Unserved(off=(False,)),
    "xtc_probability": Unserved(off=(0,)),
}
CHAT: UnservedFields = {
    **COMPLETIONS,
    "add_special_tokens": Unserved(off=(False,)),
    "audio": NEVER_OFF,
    "best_of": Unserved(off=(1,)),
    "chat_template": Unserved(instead="the server's option chat_template"),
    "chat_template_content_format": Unserved(off=("auto", "string")),
    "documents": Unserved(off=([],)),
    "echo": Unserved(off=(False,)),
    "enable_thinking": TEMPLATE,
    "function_call": Unserved(off=("none", "auto"), instead="tool_choice"),
    "functions": Unserved(off=([],), instead="tools"),
    "guideline": Unserved(off=("",)),
    "include_reasoning": Unserved(off=(True,)),
    "instructions": Unserved(off=("",), instead=SYSTEM),
    "parse_special_tokens": Unserved(off=(True,)),
    "prompt": Unserved(instead="messages"),
    "prompt_mode": TEMPLATE,
    "reasoning": Unserved(
        off=({}, {"exclude": False}), instead="reasoning_effort or chat_template_kwargs"
    ),
    "reasoning_budget": Unserved(off=(-1,)),
    "reasoning_format": Unserved(off=("auto", "deepseek", "parsed")),
    "return_full_text": Unserved(off=(False,)),
    "return_tokens_as_token_ids": Unserved(off=(False,)),
    "separate_reasoning": Unserved(off=(True,)),
    "system": Unserved(off=("", []), instead=SYSTEM),
    "system_prompt": Unserved(off=("",), instead=SYSTEM),
    "think": TEMPLATE,
    "thinking": TEMPLATE,
    "thinking_budget": NEVER_OFF,
    "thinking_budget_tokens": Unserved(off=(-1,)),
    "tool_prompt": Unserved(off=("",)),
    "verbosity": NEVER_OFF,
    "web_search_options": NEVER_OFF,
}
TOKENIZE: UnservedFields = {
    "chat_template": CHAT["chat_template"],
    "documents": CHAT["documents"],
    "enable_thinking": TEMPLATE,
    "mm_processor_kwargs": Unserved(off=({},)),
    "reasoning_effort": TEMPLATE,
    "system": CHAT["system"],
    "tool_choice": Unserved(off=("auto",), instead="chat_template_kwargs"),
    "truncate": NEVER_OFF,
    "truncate_prompt_tokens": NEVER_OFF,
}
DETOKENIZE: UnservedFields = {"skip_special_tokens": Unserved(off=(False,))}
MESSAGE: UnservedFields = {
    "annotations": Unserved(off=([],)),
    "audio": NEVER_OFF,
    "function_call": Unserved(instead="tool_calls"),
    "partial": Unserved(off=(False,), instead="continue_final_message of the request"),
    "prefix": Unserved(off=(False,), instead="continue_final_message of the request"),
    "refusal": Unserved(off=("",)),
}
"""Fields of a chat's messages. Other servers' answers have some of them, and clients send those
back."""
TOOL_CALL: UnservedFields = {"index": IGNORED}
"""Fields of a message's tool calls. A stream's deltas have them, and clients send those back."""
STREAM_OPTIONS: UnservedFields = {"include_obfuscation": Unserved(off=(False,))}


def near_miss(name: str, known: Collection[str]) -> str | None:
    """The known field that a client may have meant by another name; None if it is none of them."""
    if len(name) > MAX_NAME_LENGTH:
        return None
    spelt = name.lower().replace("-", "_")
    return next(iter(difflib.get_close_matches(spelt, known, n=1, cutoff=LIKENESS)), None)


def _is_same(value: Any, off: Any) -> bool:
    """Equal, where true and 1 are two things, as in JSON."""
    return isinstance(value, bool) == isinstance(off, bool) and bool(value == off)
