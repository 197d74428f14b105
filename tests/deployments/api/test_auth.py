"""API keys over HTTP and gRPC: what they guard, what is told, and how limits are kept."""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.message_factory import GetMessageClass

from deployments.api.auth import authenticate, rate_limit_headers
from deployments.api.tandem_pb2 import (
    DESCRIPTOR,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from deployments.router.request import Caller
from deployments.router.request_log import RequestLog
from deployments.router.tenants.account import RateLimit, RateLimits
from deployments.router.tenants.keys import ApiKey, KeyLimits, KeyRing, Keys, Tenant, digest_of
from tandem.fuzz.grpc_server import grpc_channel
from tests.deployments.loops import Models
from tests.deployments.serving import (
    MAX_REQUEST_BYTES,
    GrpcContext,
    LocalServing,
    body,
    client_of,
    complete,
    generation_request,
    local_serving,
    stream,
)
from tests.fakes import CharacterTokenizer
from workers.errors import AuthenticationError

SECRET = "sk-0123456789abcdef"
LIMITED = "sk-limited-0123456789"
BEARER = {"Authorization": f"Bearer {SECRET}"}
SERVICE = DESCRIPTOR.services_by_name["Generation"]
RPCS = dict(SERVICE.methods_by_name)
"""All of them ask for a key, those to come too."""


def ring_of(**limits: Any) -> KeyRing:
    """Two keys, of which one is limited."""
    return KeyRing(
        [
            ApiKey(digest=digest_of(SECRET), tenant=Tenant(name="alice")),
            ApiKey(
                digest=digest_of(LIMITED), tenant=Tenant(name="bob", limits=KeyLimits(**limits))
            ),
        ]
    )


@pytest.fixture
async def serving(models: Models) -> AsyncIterator[LocalServing]:
    async with local_serving(models.target, keys=Keys(ring_of())) as serving:
        yield serving


GUARDED = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("HEAD", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/docs"),
    ("GET", "/redoc"),
    ("GET", "/openapi.json"),
    ("GET", "/docs/oauth2-redirect"),
    ("GET", "/nothing"),
    ("GET", "/health/"),
    ("GET", "//health"),
    ("GET", "/HEALTH"),
    ("OPTIONS", "/v1/completions"),
]
WRONG = [
    {},
    {"Authorization": "Bearer sk-wrong-0123456789"},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer "},
    {"Authorization": SECRET},
    {"Authorization": f"Basic {SECRET}"},
    {"Authorization": f"Bearer {SECRET}x"},
    {"Authorization": f"Bearer {SECRET[:-1]}"},
    {"X-Api-Key": SECRET},
]


class TestHttp:
    @pytest.mark.parametrize(("method", "path"), GUARDED)
    async def test_all_that_runs_or_reads_a_model_needs_a_key(
        self, method: str, path: str, client: httpx.AsyncClient
    ) -> None:
        response = await client.request(method, path)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        with_key = await client.request(method, path, headers=BEARER)
        assert with_key.status_code != 401

    @pytest.mark.parametrize("headers", WRONG, ids=str)
    async def test_a_wrong_key_has_openais_body_and_is_not_repeated(
        self, headers: dict[str, str], client: httpx.AsyncClient, serving: LocalServing
    ) -> None:
        response = await client.post("/v1/completions", json=body(), headers=headers)
        assert response.status_code == 401
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert "sk-" not in response.text
        assert serving.service.num_unfinished == 0

    @pytest.mark.parametrize("path", ["/health", "/ready", "/version"])
    async def test_probes_need_no_key(self, path: str, client: httpx.AsyncClient) -> None:
        assert (await client.get(path)).status_code == 200
        assert (await client.head(path)).status_code == 200

    @pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
    async def test_any_of_the_keys_lets_in(self, scheme: str, client: httpx.AsyncClient) -> None:
        for key in (SECRET, LIMITED):
            client.headers["Authorization"] = f"{scheme} {key}"
            await complete(client)
            assert (await stream(client))[-1]["choices"][0]["finish_reason"] == "length"

    async def test_without_keys_any_header_is_taken(self, models: Models) -> None:
        async with local_serving(models.target) as serving, client_of(serving) as client:
            client.headers["Authorization"] = "Bearer unused"
            await complete(client)

    async def test_a_stranger_is_answered_before_the_body_is_read(
        self, serving: LocalServing
    ) -> None:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            raise AssertionError("the body is asked for")

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [],
        }
        await serving.app()(scope, receive, send)
        assert sent[0]["status"] == 401

    async def test_a_page_of_another_origin_reads_why_it_is_refused(
        self, serving: LocalServing
    ) -> None:
        origin = "https://chat.example.org"
        async with client_of(serving, cors_allow_origins=(origin,)) as client:
            preflight = await client.options(
                "/v1/completions",
                headers={"Origin": origin, "Access-Control-Request-Method": "POST"},
            )
            assert preflight.status_code == 200
            refused = await client.post("/v1/completions", headers={"Origin": origin})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == origin

    async def test_new_keys_hold_for_the_next_request(
        self, client: httpx.AsyncClient, serving: LocalServing
    ) -> None:
        client.headers.update(BEARER)
        await complete(client)
        tenant = Tenant(name="alice")
        serving.service.keys.ring = KeyRing([ApiKey(digest=digest_of(LIMITED), tenant=tenant)])
        assert (await client.get("/v1/models")).status_code == 401
        client.headers["Authorization"] = f"Bearer {LIMITED}"
        await complete(client)


class TestGrpc:
    def test_metadata_carries_the_key(self) -> None:
        ring = ring_of()
        metadata = [("x-request-id", "r-1"), ("authorization", f"Bearer {SECRET}")]
        caller = authenticate(ring, metadata)
        assert (caller.tenant.name, caller.request_id) == ("alice", "r-1")
        assert authenticate(ring, [("authorization", f"Bearer {SECRET}".encode())]) == (
            authenticate(ring, [("authorization", f"bearer {SECRET}")])
        )
        for headers in WRONG:
            with pytest.raises(AuthenticationError):
                authenticate(ring, [(name.lower(), value) for name, value in headers.items()])
        twice = [("authorization", "Bearer wrong-key"), ("authorization", f"Bearer {SECRET}")]
        with pytest.raises(AuthenticationError):
            authenticate(ring, twice)

    @pytest.mark.parametrize("name", RPCS)
    async def test_calls_without_a_key_are_unauthenticated(
        self, name: str, serving: LocalServing
    ) -> None:
        method = RPCS[name]
        raw = GetMessageClass(method.input_type)().SerializeToString()

        async def code_of(*metadata: tuple[str, str]) -> grpc.StatusCode:
            """The code with which an empty request ends."""
            path = f"/{SERVICE.full_name}/{name}"
            try:
                if method.server_streaming:
                    [_ async for _ in channel.unary_stream(path)(raw, metadata=metadata)]
                else:
                    await channel.unary_unary(path)(raw, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK

        async with grpc_channel(serving.service, max_request_bytes=MAX_REQUEST_BYTES) as channel:
            for metadata in ((), (("authorization", "Bearer wrong-key"),)):
                assert await code_of(*metadata) is grpc.StatusCode.UNAUTHENTICATED
            with_key = await code_of(("authorization", f"Bearer {SECRET}"))
        assert with_key in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)
        assert serving.service.num_unfinished == 0

    async def test_a_call_with_a_key_is_answered(self, serving: LocalServing) -> None:
        context = GrpcContext(authorization=f"Bearer {SECRET}")
        request = GenerateRequest(text="Hello", max_tokens=4, ignore_eos=True)
        assert len((await serving.rpcs.generate(request, context)).token_ids) == 4
        assert context.code is None


class TestLimits:
    async def test_requests_beyond_the_rate_are_429_and_tell_when_to_come_back(
        self, models: Models
    ) -> None:
        keys = Keys(ring_of(requests_per_second=2, tokens_per_minute=100_000))
        async with local_serving(models.target, keys=keys) as serving, client_of(serving) as client:
            client.headers["Authorization"] = f"Bearer {LIMITED}"
            first = await client.post("/v1/completions", json=body(max_tokens=2))
            assert first.status_code == 200
            assert first.headers["x-ratelimit-limit-requests"] == "2"
            assert first.headers["x-ratelimit-remaining-requests"] in ("0", "1", "2")
            assert first.headers["x-ratelimit-limit-tokens"] == "100000"
            responses = await asyncio.gather(
                *[client.post("/v1/completions", json=body(max_tokens=2)) for _ in range(8)]
            )
            refused = [response for response in responses if response.status_code == 429]
            assert len(refused) >= 5
            for response in refused:
                assert response.json()["error"]["code"] == "rate_limit_exceeded"
                assert response.headers["retry-after"] == "1"
                assert 0 < int(response.headers["retry-after-ms"]) <= 500
                assert response.headers["x-ratelimit-remaining-requests"] == "0"
            client.headers["Authorization"] = f"Bearer {SECRET}"
            assert "x-ratelimit-limit-requests" not in (await client.get("/v1/models")).headers
            await complete(client)

    async def test_tokens_beyond_the_minute_are_429_and_unused_ones_come_back(
        self, models: Models
    ) -> None:
        keys = Keys(ring_of(tokens_per_minute=120))
        async with local_serving(models.target, keys=keys) as serving, client_of(serving) as client:
            client.headers["Authorization"] = f"Bearer {LIMITED}"
            text = (await complete(client, max_tokens=12))["choices"][0]["text"]
            assert 103 <= self.remaining(await client.get("/v1/models")) < 113
            await complete(client, max_tokens=90, stop=text[3:6])
            assert self.remaining(await client.get("/v1/models")) > 80  # not what it might have had
            refused = await client.post("/v1/completions", json=body(max_tokens=110))
            assert refused.status_code == 429
            assert "may need 115" in refused.json()["error"]["message"]
            assert serving.service.num_unfinished == 0

    @pytest.mark.parametrize(
        ("path", "asked"),
        [("/tokenize", {"prompt": "Hello"}), ("/detokenize", {"tokens": [5]})],
    )
    async def test_they_hold_for_tokens_of_texts_too(
        self, path: str, asked: dict[str, Any], models: Models
    ) -> None:
        keys = Keys(ring_of(requests_per_second=0.01, tokens_per_minute=1))
        async with local_serving(models.target, keys=keys) as serving, client_of(serving) as client:
            client.headers["Authorization"] = f"Bearer {LIMITED}"
            first, *others = [await client.post(path, json=asked) for _ in range(3)]
            assert first.status_code == 200
            assert self.remaining(first) == 1  # no tokens are charged
            for refused in others:
                assert refused.status_code == 429
                assert 90 < int(refused.headers["retry-after"]) <= 100
            context = GrpcContext(authorization=f"Bearer {LIMITED}")
            if path == "/tokenize":
                await serving.rpcs.tokenize(TokenizeRequest(**asked), context)
            else:
                await serving.rpcs.detokenize(DetokenizeRequest(**asked), context)
            assert context.code == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert 90 < int(context.trailing["retry-after"]) <= 100
            assert (await client.post(path, json=asked, headers=BEARER)).status_code == 200
            assert serving.service.num_unfinished == 0

    async def test_tokens_of_texts_take_room_while_they_are_read(
        self, models: Models, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """So texts that wait for their turn are as few as completions."""
        keys = Keys(ring_of(max_concurrent=3))
        go_on = threading.Event()
        encode = CharacterTokenizer.encode

        def held(tokenizer: CharacterTokenizer, text: str, **options: Any) -> list[int]:
            assert go_on.wait(timeout=10)
            return encode(tokenizer, text, **options)

        monkeypatch.setattr(CharacterTokenizer, "encode", held)
        async with local_serving(models.target, keys=keys) as serving, client_of(serving) as client:
            client.headers["Authorization"] = f"Bearer {LIMITED}"

            async def ask() -> int:
                return (await client.post("/tokenize", json={"prompt": "Hello"})).status_code

            asked = [asyncio.create_task(ask()) for _ in range(8)]
            while sum(task.done() for task in asked) < 5:
                await asyncio.sleep(0.01)
            go_on.set()
            statuses = await asyncio.gather(*asked)
            assert (statuses.count(200), statuses.count(429)) == (3, 5)
            assert await ask() == 200

    def remaining(self, response: httpx.Response) -> int:
        return int(response.headers["x-ratelimit-remaining-tokens"])

    async def test_completions_at_a_time_are_limited_for_one_key_only(self, models: Models) -> None:
        keys = Keys(ring_of(max_concurrent=3))
        async with local_serving(models.target, keys=keys) as serving, client_of(serving) as client:
            serving.targets.delay_s = 0.1

            async def ask(key: str) -> int:
                headers = {"Authorization": f"Bearer {key}"}
                request = body(max_tokens=3)
                return (
                    await client.post("/v1/completions", json=request, headers=headers)
                ).status_code

            limited = [ask(LIMITED) for _ in range(8)]
            statuses = await asyncio.gather(*limited, *[ask(SECRET) for _ in range(8)])
            assert (statuses[:8].count(200), statuses[:8].count(429)) == (3, 5)
            assert statuses[8:] == [200] * 8
            assert await ask(LIMITED) == 200

    def test_the_headers_are_openais(self) -> None:
        limits = RateLimits(
            requests=RateLimit(limit=5, remaining=2, reset_s=0.6),
            tokens=RateLimit(limit=6000, remaining=0, reset_s=90.2),
        )
        assert rate_limit_headers(limits) == {
            "x-ratelimit-limit-requests": "5",
            "x-ratelimit-remaining-requests": "2",
            "x-ratelimit-reset-requests": "600ms",
            "x-ratelimit-limit-tokens": "6000",
            "x-ratelimit-remaining-tokens": "0",
            "x-ratelimit-reset-tokens": "1m31s",
        }
        assert rate_limit_headers(RateLimits()) == {}


class TestLog:
    async def test_each_request_is_one_line_without_texts_or_keys(
        self, models: Models, caplog: pytest.LogCaptureFixture
    ) -> None:
        lines: list[str] = []
        keys, log = Keys(ring_of(requests_per_second=100)), RequestLog(lines.append)
        async with (
            local_serving(models.target, keys=keys, log=log) as serving,
            client_of(serving) as client,
        ):
            client.headers.update({**BEARER, "X-Request-Id": "r-7"})
            with caplog.at_level(logging.DEBUG):
                answer = await complete(client, prompt="Secrets", n=2)
                await stream(client, prompt="Secrets", temperature=0)
                await client.post("/v1/completions", json=body(prompt="x" * 256))
            client.headers.pop("X-Request-Id")
            serving.targets.delay_s = 0.2
            request = generation_request(max_tokens=200)
            caller = Caller(tenant=Tenant(name="alice"))
            async with serving.service.open(request, caller) as generation:
                await anext(generation.run())
            await client.post(
                "/v1/completions",
                json=body(max_tokens=200),
                headers={"x-request-timeout-seconds": "0.1"},
            )
        whole, streamed, refused, left, late = map(json.loads, lines)
        assert whole["outcome"] == streamed["outcome"] == "finished"
        assert (whole["key"], whole["request_id"]) == ("alice", "r-7")
        assert answer["id"] == f"cmpl-{whole['id']}"
        assert (whole["num_choices"], whole["num_prompt_tokens"]) == (2, 7)
        assert whole["num_completion_tokens"] == 24
        assert 0 <= whole["alpha"] <= 1 <= whole["tau"]
        for line in (whole, streamed):
            parts = line["queue_s"] + line["prefill_s"] + line["decode_s"]
            assert parts <= line["total_s"] + 1e-4
            assert line["first_token_s"] == pytest.approx(
                line["queue_s"] + line["prefill_s"],
                abs=2e-6,  # each is rounded
            )
        assert (refused["outcome"], refused["error"]) == ("refused", "ContextLengthError")
        assert "id" not in refused
        assert (left["outcome"], left["key"]) == ("cancelled", "alice")
        assert "request_id" not in left
        assert (late["outcome"], late["error"]) == ("failed", "RequestTimeoutError")
        everything = "\n".join([*lines, caplog.text])
        for word in ("Secrets", "sk-", answer["choices"][0]["text"]):
            assert word not in everything
