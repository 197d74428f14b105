"""The fields of a request: what is taken, what is left out, and what is said of the others."""

import json
from typing import Any, get_args

import httpx
import pytest

from cluster.drafters import DRAFTERS
from deployments.api import unserved
from deployments.api.completions import CompletionRequest
from deployments.api.fields import Speculation
from deployments.api.validation import parse
from tests.deployments.serving import body, complete
from workers.errors import InvalidRequestError


def refusal(**fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        parse(CompletionRequest, body(**fields))
    return caught.value


def test_null_means_the_default() -> None:
    required = {"prompt": "Hello"}
    names = (set(CompletionRequest.model_fields) | set(unserved.COMPLETIONS)) - set(required)
    nulls = parse(CompletionRequest, {**required, **dict.fromkeys(names)})
    assert nulls == parse(CompletionRequest, required)


def test_best_of_may_be_all_of_them() -> None:
    assert parse(CompletionRequest, body(best_of=3, n=3, stream=True)).n == 3


@pytest.mark.parametrize(
    "name",
    ["temprature", "Temperature ", "max-tokens", "MAX_TOKENS", "stops", "repetitin_penalty",
     "top_p_", "logprob", "stream_option", "prompt_logprob", "tool_choise"],
)  # fmt: skip
def test_a_misspelt_field_is_refused(name: str) -> None:
    error = refusal(**{name: 1})
    assert error.field == name
    assert f"there is no field {name!r} in this request; did you mean" in str(error)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"best_of": 3, "n": 4}, "best_of is 3 and n is 4: it must be at least n"),
        ({"best_of": 3, "stream": True}, "best_of is 3 and n is 1: a stream cannot wait"),
        ({"max_tokens": 0}, "max_tokens is 0: it must be an integer from 1 on, unless echo or"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens is 0"),
        ({"logprobs": 21}, "logprobs is 21: it must be an integer from 0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1: it must be an integer from 0 to 20"),
        ({"logprobs": True}, "logprobs is true"),
        ({"speculation": {"mode": "fast"}}, "speculation.mode is 'fast': it must be 'auto', 'off'"),
        (
            {"speculation": {"gamma": 1}},
            "gamma is unknown here; there is mode, num_speculative_tokens and verification",
        ),
        (
            {"speculation": {"mode": "predicted"}},
            "speculation.mode is 'predicted': it needs",
        ),
        (
            {"speculation": {"verification": "ratio"}},
            "speculation.verification is 'ratio': it must be 'coupled', 'rejection' or 'block'",
        ),
        ({"speculation": "off"}, "speculation is 'off': it must be an object, with mode, num_"),
        ({"speculation": {"num_speculative_tokens": 65}}, "speculation.num_speculative_tokens"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids.0 is '1': it must be an integer"),
        ({"bad_words": [""]}, "bad_words.0 is '': it is empty"),
        ({"bad_words": ["a"] * 129}, "it must have at most 128 items"),
        ({"min_tokens": -1}, "min_tokens is -1"),
    ],
    ids=str,
)
def test_values_are_checked(fields: dict[str, Any], words: str | None) -> None:
    if words is None:
        assert parse(CompletionRequest, body(**fields))
        return
    error = refusal(**fields)
    assert words in str(error)
    assert error.field is not None
    assert error.field.startswith(next(iter(fields)))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"include_obfuscation": True}, "stream_options.include_obfuscation"),
        ({"include_usage": 1}, "stream_options.include_usage"),
        ({"include_usag": None}, "stream_options.include_usag"),
        (5, "stream_options"),
    ],
    ids=str,
)
def test_stream_options_are_checked(options: Any, field: str) -> None:
    assert refusal(stream=True, stream_options=options).field == field


def test_stream_options_may_be_off_or_absent() -> None:
    for options in ({}, {"include_obfuscation": False, "include_usage": None}):
        parsed = parse(CompletionRequest, body(stream=True, stream_options=options))
        assert not parsed.stream_options.include_usage
    assert parse(CompletionRequest, body(stream_options=None)).stream_options is None


def test_stream_options_are_of_streams_only() -> None:
    error = refusal(stream_options={"include_usage": True})
    assert error.field == "stream_options"
    assert "stream is not true" in str(error)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": float("nan")}, "temperature is nan: it must be a number from 0 to 2"),
        ({"temperature": float("inf")}, "temperature is inf: it must be a number from 0 to 2"),
        ({"temperature": "hot"}, "temperature is 'hot': it must be a number from 0 to 2"),
        ({"min_p": float("nan")}, "min_p is nan: it must be a number from 0 to 1"),
        ({"top_p": 0}, "top_p is 0: it must be a number above 0 and at most 1"),
        ({"top_k": -2}, "top_k is -2: it must be an integer from -1 to 2147483647"),
        ({"max_tokens": -1}, "max_tokens is -1: it must be an integer from 0 to 2147483647"),
        ({"max_tokens": True}, "max_tokens is true: it must be an integer from 0 to 2147483647"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5: it must be an integer from 0 to 2147483647"),
        ({"max_tokens": 1e12}, "max_tokens is 1000000000000: it must be an integer from 0 to"),
        ({"max_tokens": float("inf")}, "max_tokens is inf: it must be an integer from 0 to"),
        ({"n": 129}, "n is 129: it must be an integer from 1 to 128"),
        (
            {"repetition_penalty": 1e-40},
            "repetition_penalty is 1e-40: it must be a number from 0.1 to 10",
        ),
        (
            {"seed": 2**63},
            f"seed is {2**63}: it must be an integer from {-(2**63)} to {2**63 - 1}",
        ),
        ({"stream": "yes"}, "stream is 'yes': it must be true or false"),
        ({"user": 5}, "user is 5: it must be a string"),
        ({"stop": [5]}, "stop.0 is 5: it must be a string"),
        ({"stop": 5}, "stop is 5: it must be a list"),
        ({"prompt": ["a"] * 129}, "it has 129 prompts; at most 128 fit one request"),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias.5 is nan: it must be a finite number"),
        ({"logit_bias": [1]}, "logit_bias is [1]: it must be an object"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_in_our_words(fields: dict[str, Any], message: str) -> None:
    assert message in str(refusal(**fields))


def test_an_integer_may_be_written_with_a_point() -> None:
    """As clients do that compute it, `max_tokens=4096 / 2` say; JSON knows no other numbers."""
    parsed = parse(CompletionRequest, body(max_tokens=2.0, seed=-7.0, temperature=1.0))
    assert repr([parsed.max_tokens, parsed.seed, parsed.temperature]) == "[2, -7, 1.0]"


@pytest.mark.parametrize("key", ["٣", "-1", "+5", "05", " 5", "5.0", "x", "", "9" * 5000, "\ud800"])
def test_a_key_of_logit_bias_is_a_token_id(key: str) -> None:
    error = refusal(logit_bias={key: 1})
    assert error.field == "logit_bias"
    assert "is no token id" in str(error)


def test_tables_of_biases_have_a_limit() -> None:
    biases = {str(token): 1 for token in range(4096)}
    assert len(parse(CompletionRequest, body(logit_bias=biases)).logit_bias) == 4096
    assert "at most 4096 entries" in str(refusal(logit_bias={**biases, "4096": 1}))


HALF = "a\ud83d b"
"""What is left of an emoji that was cut in two."""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": HALF}, "prompt"),
        ({"prompt": ["a", HALF]}, "prompt"),
        ({"stop": HALF}, "stop.0"),
        ({"stop": ["a", HALF]}, "stop.1"),
        ({"cache_salt": HALF}, "cache_salt"),
        ({"user": HALF}, "user"),
        ({"model": HALF}, "model"),
        ({"promp\ud83d": 1}, "promp\\ud83d"),
        ({"bad_words": ["a", HALF]}, "bad_words.1"),
        ({"logit_bias": {HALF: 1}}, "logit_bias"),
        ({"echo": HALF}, "echo"),
        ({"suffix": HALF}, "suffix"),
    ],
    ids=ascii,
)
async def test_half_a_character_is_refused_wherever_it_stands(
    fields: dict[str, Any], param: str, client: httpx.AsyncClient
) -> None:
    content = json.dumps(body(**fields)).encode()
    headers = {"content-type": "application/json"}
    response = await client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_an_empty_body_is_told(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions")
    assert response.status_code == 400
    assert response.json()["error"]["message"] == (
        "the body is empty; it must be a JSON object, sent with the header Content-Type: "
        "application/json"
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x1f\x8b\x08", "not UTF-8; compressed bodies are not taken"),
        (b'{"prompt": "\xe9"}', "not UTF-8"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "a number of too many digits"),
        (b"[" * 19_000, "nested too deeply"),
    ],
    ids=["gzip", "latin-1", "digits", "nesting"],
)
async def test_a_body_that_cannot_be_read_is_told_why(
    content: bytes, reason: str, client: httpx.AsyncClient
) -> None:
    headers = {"content-type": "application/json"}
    response = await client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith("the body cannot be read")
    assert reason in message


async def test_the_schema_has_all_forms_of_a_prompt(client: httpx.AsyncClient) -> None:
    schema = (await client.get("/openapi.json")).json()
    prompt = schema["components"]["schemas"]["CompletionRequest"]["properties"]["prompt"]
    assert prompt["anyOf"][0] == {"type": "string"}
    assert [form.get("minItems") for form in prompt["anyOf"]] == [None, 1, 1]


def test_a_stop_string_has_a_limit() -> None:
    assert parse(CompletionRequest, body(stop="a" * 1024)).stop
    assert "stop.0 is" in str(refusal(stop="a" * 1025))
    assert "at most 1024 characters" in str(refusal(stop="a" * 1025))


async def test_a_thousand_unknown_fields_are_one_message(client: httpx.AsyncClient) -> None:
    request = body(**{f"field{n}": n for n in range(1000)})
    response = await client.post("/v1/completions", json=request)
    assert response.status_code == 400
    assert "has 1000 fields that are unknown here" in response.json()["error"]["message"]


async def test_not_a_number_is_refused_as_json_writes_it(client: httpx.AsyncClient) -> None:
    content = json.dumps(body(temperature=float("nan")))
    assert "NaN" in content
    headers = {"content-type": "application/json"}
    response = await client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert "a number from 0 to 2" in response.json()["error"]["message"]


async def test_what_clients_send_is_served(client: httpx.AsyncClient) -> None:
    """Every field of the usual clients, switched off."""
    await complete(
        client,
        metadata={"run": "1"},
        store=False,
        service_tier="auto",
        request_id="r-1",
        suffix="",
        response_format={"type": "text"},
        tools=None,
        top_k=None,
        min_p=None,
        repetition_penalty=None,
        ignore_eos=None,
        cache_salt=None,
        min_tokens=0,
        skip_special_tokens=True,
        best_of=1,
        logprobs=None,
        echo=False,
        length_penalty=1.0,
        use_beam_search=False,
        stream_options=None,
    )


@pytest.mark.parametrize(
    "fields", [{"model": "m" * 6_000}, {"suffix": "f" * 6_000}, {"logit_bias": {"k" * 6_000: 1}}]
)
async def test_a_refusal_repeats_little_of_what_was_sent(
    fields: dict[str, Any], client: httpx.AsyncClient
) -> None:
    response = await client.post("/v1/completions", json=body(**fields))
    assert response.status_code in (400, 404)
    assert len(response.content) < 3_000


def test_a_request_may_name_every_drafter() -> None:
    modes = {*get_args(Speculation.model_fields["mode"].annotation)}
    assert modes == {"auto", "off", "predicted", *DRAFTERS}
