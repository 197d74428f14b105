"""The HTTP API in process: OpenAI's format, and what a wrong request is told."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.deployments.serving import (
    LocalServing,
    body,
    client_of,
    complete,
    local_serving,
    stream,
)
from tests.tiny_models import save_quick_model
from workers.model import Model, load_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    name = save_quick_model(tmp_path_factory.mktemp("model"))
    return load_model(name, dtype="float32", device="cpu")


@pytest.fixture
async def serving(model: Model) -> AsyncIterator[LocalServing]:
    async with local_serving(model) as serving:
        yield serving


async def test_a_completion_has_openais_shape(client: httpx.AsyncClient) -> None:
    completion = await complete(client)
    assert completion["object"] == "text_completion"
    assert completion["model"] == "tiny"
    (choice,) = completion["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert len(choice["text"]) == 12
    usage = completion["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 12)
    assert usage["total_tokens"] == 17
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0


async def test_streamed_pieces_make_the_same_text(client: httpx.AsyncClient) -> None:
    whole = await complete(client)
    events = await stream(client)
    assert "".join(e["choices"][0]["text"] for e in events) == whole["choices"][0]["text"]
    assert [e["choices"][0]["finish_reason"] for e in events][-1] == "length"
    assert len({e["id"] for e in events}) == 1
    assert all(e["usage"] is None for e in events)


async def test_usage_is_the_last_event_when_asked_for(client: httpx.AsyncClient) -> None:
    events = await stream(client, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 12
    assert all(event["usage"] is None for event in events[:-1])


async def test_several_prompts_and_n_are_choices_in_order(client: httpx.AsyncClient) -> None:
    both = await complete(client, prompt=["Hello", "World"], n=2)
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert both["usage"]["prompt_tokens"] == 10  # each prompt once
    texts = [choice["text"] for choice in both["choices"]]
    assert len(set(texts)) == 4
    for index, (prompt, seed) in enumerate([("Hello", 3), ("Hello", 4), ("World", 3)]):
        alone = await complete(client, prompt=prompt, seed=seed)
        assert alone["choices"][0]["text"] == texts[index]
    events = await stream(client, prompt=["Hello", "World"], n=2)
    streamed = [""] * 4
    for event in events:
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == texts


async def test_token_ids_are_prompts_too(client: httpx.AsyncClient, serving: LocalServing) -> None:
    ids = serving.service.model.tokenizer.encode("Hello")
    as_text, as_ids = await complete(client), await complete(client, prompt=ids)
    assert as_text["choices"] == as_ids["choices"]
    two = await complete(client, prompt=[ids, ids])
    assert len(two["choices"]) == 2


async def test_without_a_seed_texts_differ(client: httpx.AsyncClient) -> None:
    texts = {(await complete(client, seed=None))["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 3


async def test_sampling_fields_reach_the_sampler(client: httpx.AsyncClient) -> None:
    biased = await complete(client, logit_bias={"40": 100}, max_tokens=3)
    assert biased["choices"][0]["text"] == "III"
    greedy = [await complete(client, temperature=0, seed=seed) for seed in (1, 2)]
    assert greedy[0]["choices"] == greedy[1]["choices"]
    only_one = [await complete(client, top_k=1, seed=seed) for seed in (1, 2)]
    assert only_one[0]["choices"] == only_one[1]["choices"] == greedy[0]["choices"]


async def test_stop_ends_the_text(client: httpx.AsyncClient) -> None:
    text = (await complete(client))["choices"][0]["text"]
    for stop in (text[4:6], [text[4:6], "never"]):
        (choice,) = (await complete(client, stop=stop))["choices"]
        assert (choice["text"], choice["finish_reason"]) == (
            text[: text.index(text[4:6])],
            "stop",
        )


@pytest.mark.parametrize(
    ("fields", "status", "param", "words"),
    [
        ({"model": "gpt-9"}, 404, "model", ["'gpt-9'", "'tiny'"]),
        ({"prompt": ""}, 400, "prompt", ["empty"]),
        ({"prompt": ["a", ""]}, 400, "prompt.1", ["empty"]),
        ({"prompt": []}, 400, "prompt", ["[]", "a string, a list of token ids"]),
        ({"prompt": 7}, 400, "prompt", ["7"]),
        ({"prompt": ["a", 3]}, 400, "prompt", ["item 1 is 3"]),
        ({"prompt": [5, 97]}, 400, "prompt", ["token id 97", "0 to 96"]),
        ({"prompt": ["a"] * 129}, 400, "prompt", ["129 prompts", "at most 128"]),
        ({"prompt": "x" * 250}, 400, "max_tokens", ["250 tokens", "262 together", "256 tokens"]),
        ({"prompt": "x" * 256}, 400, "prompt", ["256 tokens"]),
        ({"max_tokens": 0}, 400, "max_tokens", ["0", "integer from 1 on"]),
        ({"max_tokens": -5}, 400, "max_tokens", ["-5"]),
        ({"max_tokens": "many"}, 400, "max_tokens", ["'many'", "integer"]),
        ({"temperature": -0.1}, 400, "temperature", ["-0.1", "a number from 0 to 2"]),
        ({"temperature": 2.1}, 400, "temperature", ["2.1", "a number from 0 to 2"]),
        ({"temperature": "hot"}, 400, "temperature", ["'hot'", "number"]),
        ({"top_p": 0}, 400, "top_p", ["0", "above 0 and at most 1"]),
        ({"top_p": 1.5}, 400, "top_p", ["1.5", "above 0 and at most 1"]),
        ({"seed": 1.5}, 400, "seed", ["1.5", "integer"]),
        ({"seed": 2**63}, 400, "seed", [str(2**63), f"to {2**63 - 1}"]),
        ({"stop": ""}, 400, "stop.0", ["''", "empty"]),
        ({"stop": ["a"] * 17}, 400, "stop", ["at most 16"]),
        ({"n": 0}, 400, "n", ["0", "from 1 to 128"]),
        ({"logit_bias": {"5": 101}}, 400, "logit_bias.5", ["101", "at most 100"]),
        ({"logit_bias": {"97": 1}}, 400, "logit_bias", ["token id 97"]),
        (
            {"stream": True, "stream_options": {"include_usag": True}},
            400,
            "stream_options.include_usag",
            ["include_usag"],
        ),
        ({"temprature": 0.5}, 400, "temprature", ["no field 'temprature'"]),
        ({"logprobs": 30}, 400, "logprobs", ["30", "0 to 20"]),
        ({"best_of": 0}, 400, "best_of", ["0"]),
        ({"stop_token_ids": [97]}, 400, "stop_token_ids", ["token id 97", "0 to 96"]),
        (
            {"speculation": {"mode": "prompt_lookup"}},
            400,
            "speculation.mode",
            ["'prompt_lookup'", "'model'", "'auto' or 'off'"],
        ),
    ],
    ids=str,
)
async def test_a_wrong_request_is_told_field_value_and_limit(
    fields: dict[str, Any],
    status: int,
    param: str | None,
    words: list[str],
    client: httpx.AsyncClient,
    serving: LocalServing,
) -> None:
    response = await client.post("/v1/completions", json=body(**fields))
    assert response.status_code == status
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
    for word in words:
        assert word in error["message"]
    assert serving.service.num_unfinished == 0


async def test_context_length_has_openais_code(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json=body(prompt="x" * 300))
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("content", "word"), [("{bad", "JSON"), ("[]", "object"), ('"text"', "object")]
)
async def test_a_body_that_is_no_json_object_is_told(
    content: str, word: str, client: httpx.AsyncClient
) -> None:
    headers = {"content-type": "application/json"}
    response = await client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert word in response.json()["error"]["message"]


async def test_a_body_without_its_content_type_is_told(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    response = await client.post("/v1/completions", content=json.dumps(body()), headers=headers)
    assert response.status_code == 400
    assert "Content-Type: application/json" in response.json()["error"]["message"]


async def test_required_fields_are_named(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={"model": "tiny"})
    assert response.json()["error"]["message"] == "prompt is missing; it is required"


async def test_unknown_paths_and_methods_have_the_error_body(client: httpx.AsyncClient) -> None:
    assert "/v1/nothing" in (await client.get("/v1/nothing")).json()["error"]["message"]
    response = await client.get("/v1/completions")
    assert response.status_code == 405
    assert "GET /v1/completions" in response.json()["error"]["message"]


async def test_models_and_health(client: httpx.AsyncClient) -> None:
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 256)
    assert (card["weight_bytes"] > 0, card["quantization"]) == (True, "none")
    assert (card["draft_weight_bytes"], card["draft_quantization"]) == (None, None)
    assert (await client.get("/v1/models/tiny")).json() == card
    missing = await client.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert "'org/other'" in missing.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/v1/models/tiny"])
async def test_what_is_got_may_be_asked_for_by_head(path: str, client: httpx.AsyncClient) -> None:
    head, got = await client.head(path), await client.get(path)
    assert (head.status_code, got.status_code) == (200, 200)
    assert head.headers["content-length"] == got.headers["content-length"]


async def test_usage_is_in_every_event_when_asked_for(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await stream(client, stream_options=options, n=2)
    assert events[-1]["choices"] == []
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 24
    assert {event["usage"]["prompt_tokens"] for event in events} == {5}
    only_asked = await stream(client, stream_options={"continuous_usage_stats": True})
    assert all(event["usage"] is None for event in only_asked)


async def test_pages_of_other_origins_may_call_only_if_allowed(serving: LocalServing) -> None:
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    async with client_of(serving) as client:
        response = await client.options("/v1/completions", headers=preflight)
        assert response.status_code == 405
    for allowed in ("https://a.example", "*"):
        async with client_of(serving, cors_allow_origins=("https://b.example", allowed)) as client:
            response = await client.options("/v1/completions", headers=preflight)
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] == allowed
            response = await client.post("/v1/completions", json={}, headers=preflight)
            assert response.status_code == 400
            assert response.headers["access-control-allow-origin"] == allowed
    async with client_of(serving, cors_allow_origins=("https://b.example",)) as client:
        response = await client.options("/v1/completions", headers=preflight)
        assert "access-control-allow-origin" not in response.headers


async def test_a_full_queue_is_429_with_retry_after(model: Model) -> None:
    async with (
        local_serving(model, max_running=1, max_waiting=1) as serving,
        client_of(serving) as client,
    ):
        serving.targets.delay_s = 0.2
        running = [asyncio.create_task(complete(client, max_tokens=2)) for _ in range(2)]
        while serving.service.num_unfinished < 2:
            await asyncio.sleep(0.01)
        refused = await client.post("/v1/completions", json=body())
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        error = refused.json()["error"]
        assert error["type"] == "rate_limit_error"
        assert "at most 1 run and 1 wait" in error["message"]
        assert len(await asyncio.gather(*running)) == 2
        await complete(client)


async def test_a_lost_target_is_503_or_an_error_event(
    client: httpx.AsyncClient, serving: LocalServing
) -> None:
    serving.targets.kill("replica-0")
    response = await client.post("/v1/completions", json=body())
    assert response.status_code == 503
    assert "no target group answered" in response.json()["error"]["message"]
    (event,) = await stream(client)
    assert event["error"]["code"] == "unavailable"


async def test_no_traceback_reaches_a_client(
    client: httpx.AsyncClient, serving: LocalServing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(serving.service, "open", fail)
    response = await client.post("/v1/completions", json=body())
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error; the server's log says more"


@pytest.mark.parametrize("num_events", [0, 2])
async def test_a_client_that_leaves_frees_everything(
    num_events: int, serving: LocalServing
) -> None:
    """Over a raw ASGI connection, since httpx's in-process transport never disconnects."""
    app = serving.app()
    left = asyncio.Event()
    sent: list[dict[str, Any]] = []
    content = json.dumps(body(stream=True, max_tokens=200, ignore_eos=True)).encode()
    inbox = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if inbox:
            return inbox.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if len(sent) > num_events:
            left.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    async with asyncio.timeout(10):
        await app(scope, receive, send)
        while serving.service.num_unfinished or serving.loop.num_live:
            await asyncio.sleep(0.01)
        while serving.targets.num_used_blocks or serving.drafts.num_used_blocks:
            await asyncio.sleep(0.01)
    assert serving.targets.num_sequences == serving.drafts.num_sequences == 0
    assert len(sent) < 100
