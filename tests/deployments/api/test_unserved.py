"""Fields of other servers' requests: off they are left out, on they are refused, unknown ones
too where they are nearly a known one."""

from typing import Any

import pytest

from deployments.api import unserved
from deployments.api.chat import ChatCompletionRequest
from deployments.api.completions import CompletionRequest
from deployments.api.tokens import DetokenizeRequest, TokenizeRequest
from deployments.api.unserved import ANYTHING
from deployments.api.validation import RequestModel, parse
from tests.deployments.serving import body
from workers.errors import InvalidRequestError

ASK = {"messages": [{"role": "user", "content": "Hi"}]}
REQUESTS: dict[type[RequestModel], dict[str, Any]] = {
    CompletionRequest: body(),
    ChatCompletionRequest: ASK,
    TokenizeRequest: {"prompt": "Hi"},
    DetokenizeRequest: {"tokens": [1]},
}
"""The requests that have fields of their own at their top, each with what it needs."""
FIELDS = [
    pytest.param(model, name, id=f"{model.__name__}-{name}")
    for model in REQUESTS
    for name in sorted(model.unserved_fields().keys() - model.model_fields.keys())
]
TEXT_CHANGES: dict[str, Any] = {
    "adapter_id": "a/b",
    "ban_eos_token": True,
    "custom_logit_processor": "x",
    "dynatemp_range": 0.5,
    "ebnf": "root ::= [a-z]",
    "eos_token_id": 5,
    "extra_body": {"top_k": 1},
    "format": "json",
    "grammar": {"type": "regex", "value": "a"},
    "guided_decoding": {"regex": "a"},
    "json_schema": {"type": "object"},
    "logits_processors": ["x.Y"],
    "lora": [{"id": 0, "scale": 1}],
    "lora_path": "x",
    "max_new_tokens": 5,
    "max_tokens_to_sample": 5,
    "min_new_tokens": 5,
    "no_stop_trim": True,
    "options": {"num_ctx": 512},
    "parameters": {"top_k": 1},
    "random_seed": 5,
    "regex": "a",
    "repeat_penalty": 1.1,
    "samplers": ["top_k"],
    "stop_sequences": ["x"],
    "stop_strings": ["x"],
    "structural_tag": "{}",
    "suppress_tokens": [5],
    "system": "Be brief.",
    "tfs_z": 0.5,
    "thinking_token_budget": 100,
    "top_n_sigma": 1.0,
    "truncate": 5,
    "vllm_xargs": {"a": 1},
    "watermark": True,
}
"""Fields that would change a text, as clients send them. Written down here so that none is lost."""
OF_SPECULATION = {
    "drafter": "none",
    "gamma": 3,
    "num_speculative_tokens": 1,
    "verification": "block",
}
"""What an app's options are called: in a request these are fields of `speculation`."""
HARMLESS = [
    "cache_prompt", "custom_params", "data_parallel_rank", "decoder_input_details", "details",
    "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers",
    "dynatemp_exponent", "extra_key", "id_slot", "keep_alive", "kv_transfer_params",
    "media_io_kwargs", "mirostat_eta", "mirostat_tau", "n_discard", "n_keep", "penalize_nl",
    "post_sampling_probs", "prompt_cache_key", "prompt_cache_retention", "provider",
    "response_fields", "rid", "slot_id", "stream_reasoning", "timings_per_token", "transforms",
    "xtc_threshold",
]  # fmt: skip
"""Fields that clients send and that change no text, whatever they are near to."""


def parsed(model: type[RequestModel], **fields: Any) -> RequestModel:
    return parse(model, {**REQUESTS[model], **fields})


def refusal(model: type[RequestModel], **fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        parsed(model, **fields)
    assert caught.value.field == next(iter(fields))
    return caught.value


@pytest.mark.parametrize(("model", "name"), FIELDS)
def test_a_field_may_be_off(model: type[RequestModel], name: str) -> None:
    field = model.unserved_fields()[name]
    for value in (None, *field.off):
        given = {"any": "thing"} if value is ANYTHING else value
        assert parsed(model, **{name: given}) == parsed(model)
    if ANYTHING not in field.off:
        error = refusal(model, **{name: "on"})
        assert f"{name} is 'on': it is not served yet; {field.advice()}" in str(error)


@pytest.mark.parametrize("model", [CompletionRequest, ChatCompletionRequest])
@pytest.mark.parametrize("name", TEXT_CHANGES)
def test_what_would_change_a_text_is_refused(model: type[RequestModel], name: str) -> None:
    error = refusal(model, **{name: TEXT_CHANGES[name]})
    assert f"{name} is " in str(error)
    assert "it is not served yet; leave it out" in str(error)


@pytest.mark.parametrize("model", [CompletionRequest, ChatCompletionRequest])
@pytest.mark.parametrize("name", OF_SPECULATION)
def test_an_option_of_the_app_is_refused_with_the_field_for_it(
    model: type[RequestModel], name: str
) -> None:
    error = refusal(model, **{name: OF_SPECULATION[name]})
    assert "use speculation." in str(error)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chat_template", "x"),
        ("enable_thinking", False),
        ("instructions", "Be brief."),
        ("prompt", "Hi"),
        ("reasoning", {"effort": "high"}),
        ("reasoning", {"enabled": False}),
        ("reasoning", {"max_tokens": 5}),
        ("reasoning_format", "none"),
        ("thinking", {"type": "enabled", "budget_tokens": 1024}),
        ("thinking_budget", 5),
        ("tool_prompt", "x"),
    ],
    ids=str,
)
def test_so_is_what_would_change_a_chat(name: str, value: Any) -> None:
    refusal(ChatCompletionRequest, **{name: value})


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"detokenize": False}, "leave it out or send true, and use return_token_ids"),
        ({"detokenize": 1}, "leave it out or send true"),
        ({"suffix": "x"}, 'leave it out or send ""'),
        ({"stop_sequences": ["x"]}, "leave it out or send [], and use stop in its place"),
        ({"stop_strings": "x"}, "and use stop in its place"),
        ({"eos_token_id": 5}, "leave it out, and use stop_token_ids in its place"),
        ({"regex": "a"}, "leave it out, and use structured_outputs.regex in its place"),
        ({"json_schema": {}}, "and use structured_outputs.json in its place"),
        ({"ebnf": "x"}, "and use structured_outputs.grammar in its place"),
        ({"max_length": 5}, "and use max_tokens in its place"),
        ({"repeat_penalty": 1.1}, "leave it out or send 1, and use repetition_penalty in its"),
        ({"extra_body": {"n": 2}}, "leave it out or send {}, and use fields of the request"),
        ({"tools": [{}]}, "and use /v1/chat/completions in its place"),
        ({"top_n_sigma": 2}, "leave it out or send -1 or 0"),
    ],
    ids=str,
)
def test_a_refusal_says_what_to_use(fields: dict[str, Any], advice: str) -> None:
    ((name, value),) = fields.items()
    assert advice in str(refusal(CompletionRequest, **{name: value}))


@pytest.mark.parametrize("model", [CompletionRequest, ChatCompletionRequest])
def test_a_field_to_use_is_served(model: type[RequestModel]) -> None:
    in_words = {"a", "fields", "the", "tools", "/v1/chat/completions"}
    values: dict[str, Any] = {
        "disable_any_whitespace": True,
        "json": {"type": "object"},
        "mode": "off",
        "num_speculative_tokens": 1,
        "verification": "block",
    }
    unserved_fields = model.unserved_fields().items()
    named = {field.instead.split()[0] for _, field in unserved_fields if field.instead}
    for name in named - in_words:
        field, _, inner = name.partition(".")
        assert field in model.model_fields
        if inner:
            beside = {"json_object": True} if "whitespace" in inner else {}
            assert parsed(model, **{field: {inner: values.get(inner, "start: /a/"), **beside}})


@pytest.mark.parametrize("model", [CompletionRequest, ChatCompletionRequest])
@pytest.mark.parametrize("name", HARMLESS)
def test_a_field_that_changes_no_text_is_left_out(model: type[RequestModel], name: str) -> None:
    assert parsed(model, **{name: 0}) == parsed(model)


@pytest.mark.parametrize("name", ["verbosity", "web_search_options", "x" * 6_000, ""])
def test_a_field_that_nobody_knows_is_left_out(name: str) -> None:
    assert parsed(CompletionRequest, **{name: 1}) == parsed(CompletionRequest)


def test_tokens_of_a_text_are_not_cut_in_silence() -> None:
    refusal(TokenizeRequest, truncate_prompt_tokens=5)
    refusal(DetokenizeRequest, skip_special_tokens=True)


def test_a_misspelt_field_that_is_not_served_is_refused() -> None:
    error = refusal(CompletionRequest, stop_sequence=["x"])
    assert "did you mean 'stop_sequences'?" in str(error)


def test_tables_hold_no_field_that_is_served_everywhere() -> None:
    """Such a row would never be looked at."""
    served = CompletionRequest.model_fields.keys() & ChatCompletionRequest.model_fields.keys()
    assert not unserved.COMPLETIONS.keys() & served
    assert not unserved.CHAT.keys() & served
    assert not unserved.COMPLETIONS.keys() & CompletionRequest.model_fields.keys()
