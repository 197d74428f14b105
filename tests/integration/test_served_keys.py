"""API keys through Serve's own proxies, over HTTP and gRPC, and a key file that changes."""

import os
import time
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from google.protobuf.message_factory import GetMessageClass

from deployments.api.tandem_pb2 import DESCRIPTOR, GenerateRequest
from deployments.api.tandem_pb2_grpc import GenerationStub
from tests.integration.conftest import (
    KEY,
    KEYS,
    METADATA,
    MODEL,
    RARE_KEY,
    Served,
    request,
)

OTHER = "sk-of-bob-0123456789"
"""No key of the app's at first."""
CHANGE_TIMEOUT_S = 30.0

pytestmark = pytest.mark.usefixtures("served")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_http_asks_for_a_key_and_returns_the_requests_id(
    served: Served, http: httpx.Client
) -> None:
    body = request("def f(", max_tokens=4)
    with httpx.Client(base_url=served.url, timeout=60) as stranger:
        for headers in ({}, bearer(OTHER)):
            refused = stranger.post("/v1/completions", json=body, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        assert stranger.get("/openapi.json").status_code == 401
        open_paths = ("/health", "/ready", "/version")
        assert [stranger.get(path).status_code for path in open_paths] == [200] * 3
    headers = {**bearer(KEY), "X-Request-Id": "r-17"}
    answer = http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    assert answer.headers.get_list("x-request-id") == ["r-17"]


def test_openais_client_sends_its_key(served: Served) -> None:
    base_url = f"{served.url}/v1"
    with openai.OpenAI(base_url=base_url, api_key=KEY, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
    with (
        openai.OpenAI(base_url=base_url, api_key=OTHER, max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_every_grpc_method_asks_for_a_key(served: Served) -> None:
    methods = DESCRIPTOR.services_by_name["Generation"].methods
    assert methods
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        stub = GenerationStub(channel)
        for method in methods:
            message = GetMessageClass(method.input_type)()
            call = getattr(stub, method.name)
            call = call if method.server_streaming else call.future
            for metadata in ((), (("authorization", f"Bearer {OTHER}"),)):
                code = call(message, metadata=metadata, timeout=30).code()
                assert code is grpc.StatusCode.UNAUTHENTICATED, method.name


def test_grpc_takes_a_key(served: Served) -> None:
    message = GenerateRequest(text="def f(", max_tokens=4, ignore_eos=True)
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        stub = GenerationStub(channel)
        assert len(stub.Generate(message, metadata=METADATA).token_ids) == 4
        chunks = stub.GenerateStream(message, metadata=METADATA)
        assert sum(len(chunk.token_ids) for chunk in chunks) == 4


def test_grpc_tells_when_to_come_back(served: Served, http: httpx.Client) -> None:
    message = GenerateRequest(text="def f(", max_tokens=4)
    metadata = (("authorization", f"Bearer {RARE_KEY}"),)
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        stub = GenerationStub(channel)
        stub.Generate(message, metadata=metadata)
        refused = http.post("/v1/completions", json=request("def f("), headers=bearer(RARE_KEY))
        assert refused.status_code == 429
        for call in (
            lambda: stub.Generate(message, metadata=metadata),
            lambda: list(stub.GenerateStream(message, metadata=metadata)),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            told = dict(caught.value.trailing_metadata())
            assert 90 < int(told["retry-after"]) <= int(refused.headers["retry-after"])
            assert int(told["retry-after-ms"]) > 90_000


def test_a_changed_file_holds_without_a_restart(http: httpx.Client, key_file: Path) -> None:
    def change(text: str, *, refused: str, taken: str) -> None:
        new = key_file.with_suffix(".new")
        new.write_text(text)
        os.replace(new, key_file)
        until = time.monotonic() + CHANGE_TIMEOUT_S
        while http.get("/v1/models", headers=bearer(taken)).status_code == 401:
            assert time.monotonic() < until
            time.sleep(0.1)
        assert http.get("/v1/models", headers=bearer(refused)).status_code == 401

    assert http.get("/v1/models", headers=bearer(OTHER)).status_code == 401
    change(f"keys: [{{name: bob, key: {OTHER}}}]\n", refused=KEY, taken=OTHER)
    change(KEYS, refused=OTHER, taken=KEY)
