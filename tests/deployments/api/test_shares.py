"""What a request costs before it runs, rendering and tokenizing: keys take turns at it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from deployments.api.grpc import Rpcs
from deployments.api.http import HttpOptions, make_app
from deployments.api.tandem_pb2 import (
    ChatMessage,
    ChatRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from deployments.router.chat import reader
from deployments.router.chat.template import ChatTemplate
from deployments.router.service import GenerationService
from deployments.router.tenants.keys import ApiKey, KeyRing, Tenant, digest_of
from tests.deployments.scripted import chat_tokenizer, scripted_service
from tests.deployments.serving import MAX_REQUEST_BYTES, GrpcContext

FLOODING, QUIET = "sk-alice-0123456789", "sk-bob-0123456789"
NUM_FLOODING = 30


class Gate:
    """Holds what is called in threads, and notes the calls."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._may_go_on = threading.Event()

    def hold(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def held(*args: Any, **options: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                self.begun.append(str(args))
                assert self._may_go_on.wait(timeout=10)
            return function(*args, **options)

        return held

    def open(self) -> None:
        self._may_go_on.set()


class Clients:
    """Clients of one service over HTTP and gRPC."""

    def __init__(self, service: GenerationService, client: httpx.AsyncClient) -> None:
        self._client = client
        self._rpcs = Rpcs(service, max_request_bytes=MAX_REQUEST_BYTES)

    async def http(self, path: str, key: str, **body: Any) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        response = await self._client.post(path, json=body, headers=headers)
        assert response.status_code == 200, response.text

    async def grpc(self, method: str, key: str, request: Any) -> None:
        context = GrpcContext(authorization=f"Bearer {key}")
        await getattr(self._rpcs, method)(request, context)
        assert context.code is None, context.details


@pytest.fixture
async def service() -> AsyncIterator[GenerationService]:
    tokenizer = chat_tokenizer("{{ messages[0].content }}")
    async with scripted_service(["x"], tokenizer) as service:
        service.keys.ring = KeyRing(
            [
                ApiKey(digest=digest_of(key), tenant=Tenant(name=key.split("-")[1]))
                for key in (FLOODING, QUIET)
            ]
        )
        yield service


@pytest.fixture
async def clients(service: GenerationService) -> AsyncIterator[Clients]:
    app = make_app(service, HttpOptions(max_request_bytes=MAX_REQUEST_BYTES))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield Clients(service, client)


LONG = "a" * 500
CHAT = [{"role": "user", "content": LONG}]
FLOODS: dict[str, Callable[[Clients], Awaitable[None]]] = {
    "chats": lambda at: at.http("/v1/chat/completions", FLOODING, messages=CHAT, max_tokens=1),
    "echo": lambda at: at.http(
        "/v1/completions", FLOODING, prompt=[66] * 50, echo=True, max_tokens=1
    ),
    "words": lambda at: at.http(
        "/v1/completions", FLOODING, prompt=[66], bad_words=["a" * 99], max_tokens=1
    ),
    "tokenize": lambda at: at.http("/tokenize", FLOODING, prompt=LONG),
    "tokenize a chat": lambda at: at.http("/tokenize", FLOODING, messages=CHAT),
    "detokenize": lambda at: at.http("/detokenize", FLOODING, tokens=[66] * 500),
    "Chat": lambda at: at.grpc(
        "chat",
        FLOODING,
        ChatRequest(messages=[ChatMessage(role="user", content=LONG)], max_tokens=1),
    ),
    "Tokenize": lambda at: at.grpc("tokenize", FLOODING, TokenizeRequest(prompt=LONG)),
    "Detokenize": lambda at: at.grpc("detokenize", FLOODING, DetokenizeRequest(tokens=[66] * 500)),
}


@pytest.mark.parametrize("name", FLOODS)
async def test_a_flood_of_one_key_does_not_hold_up_the_chat_of_another(
    name: str, service: GenerationService, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    tokenizer = service.model.tokenizer
    monkeypatch.setattr(ChatTemplate, "render", gate.hold(ChatTemplate.render))
    for method in ("encode", "decode"):
        monkeypatch.setattr(tokenizer, method, gate.hold(getattr(tokenizer, method)))
    flood = [asyncio.ensure_future(FLOODS[name](clients)) for _ in range(NUM_FLOODING)]
    while len(gate.begun) < reader.NUM_THREADS:
        await asyncio.sleep(0.01)
    quiet = asyncio.create_task(
        clients.http(
            "/v1/chat/completions",
            QUIET,
            messages=[{"role": "user", "content": "bbb"}],
            max_tokens=1,
        )
    )
    await asyncio.sleep(0.05)  # until it waits for its turn
    gate.open()
    await quiet
    await asyncio.gather(*flood)
    of_quiet = [index for index, call in enumerate(gate.begun) if "bbb" in call]
    assert len(of_quiet) == 2  # its template and its tokens
    assert of_quiet[-1] < len(gate.begun) / 2
    assert service.num_unfinished == 0
