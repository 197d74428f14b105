"""API keys over HTTP and gRPC: what they let in."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.message_factory import GetMessageClass

from deployments.api.auth import authenticate
from deployments.api.tandem_pb2 import DESCRIPTOR, GenerateRequest
from deployments.router.tenants.keys import ApiKey, KeyRing, Keys, Tenant, digest_of
from tandem.fuzz.grpc_server import grpc_channel
from tests.deployments.api.keys import BEARER, LIMITED, SECRET, ring_of
from tests.deployments.loops import Models
from tests.deployments.serving import (
    MAX_REQUEST_BYTES,
    GrpcContext,
    LocalServing,
    body,
    client_of,
    complete,
    local_serving,
    stream,
)
from workers.errors import AuthenticationError

SERVICE = DESCRIPTOR.services_by_name["Generation"]
RPCS = dict(SERVICE.methods_by_name)
"""All of them ask for a key, those to come too."""


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
