"""A GenerationService over real tiny workers in this process: everything but Serve."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import grpc
import httpx
from fastapi import FastAPI

from deployments.api.completions import CompletionRequest
from deployments.api.grpc import Rpcs
from deployments.api.http import HttpOptions, make_app
from deployments.router.admission import AdmissionLimits
from deployments.router.chat.template import ChatTemplate
from deployments.router.grammars import make_compiler
from deployments.router.health import Health
from deployments.router.loop import LoopOptions, RoundLoop
from deployments.router.policy.gamma import GammaController
from deployments.router.request import GenerationRequest
from deployments.router.request_log import RequestLog
from deployments.router.service import GenerationService, ServedModel
from deployments.router.tenants.keys import Keys
from deployments.router.tokenizer import Tokenizer
from tests.deployments.loops import (
    CACHE,
    Models,
    drafters_of,
    local_targets,
    model_drafts,
    running_loop,
)
from tests.fakes import CharacterTokenizer, LocalWorkers
from workers.drafters.model import ModelDrafter
from workers.model import Model
from workers.paged_model import CacheOptions
from workers.types import Rule

MAX_REQUEST_BYTES = 20_000
RECOVERY_TIMEOUT_S = 0.5


@dataclass(frozen=True)
class LocalServing:
    service: GenerationService
    loop: RoundLoop
    targets: LocalWorkers
    drafts: LocalWorkers
    health: Health

    def app(self, **options: Any) -> FastAPI:
        return make_app(
            self.service, HttpOptions(**{"max_request_bytes": MAX_REQUEST_BYTES, **options})
        )

    @property
    def rpcs(self) -> Rpcs:
        """The methods of gRPC."""
        return Rpcs(self.service, max_request_bytes=MAX_REQUEST_BYTES)

    async def wait_until_nothing_is_held(self) -> None:
        async with asyncio.timeout(10):
            while (
                self.service.num_unfinished
                or self.loop.num_live
                or self.targets.num_sequences
                or self.targets.num_used_blocks
                or self.drafts.num_sequences
                or self.drafts.num_used_blocks
            ):
                await asyncio.sleep(0.01)


class GrpcContext:
    """What Serve's context of a gRPC call is to a router."""

    def __init__(self, **metadata: str) -> None:
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.trailing: dict[str, str] = {}
        self._metadata = [(name.replace("_", "-"), value) for name, value in metadata.items()]

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, metadata: list[tuple[str, str]]) -> None:
        self.trailing = dict(metadata)

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._metadata


@asynccontextmanager
async def local_serving(
    model: Model,
    *,
    max_running: int = 16,
    max_waiting: int = 64,
    gamma: int | Literal["dynamic"] | GammaController = 4,
    drafter: str = "model",
    draft: Model | None = None,
    draft_worker: Callable[[], ModelDrafter] | None = None,
    cache: CacheOptions = CACHE,
    tokenizer: Tokenizer | None = None,
    aliases: tuple[str, ...] = (),
    chat_template: ChatTemplate | None = None,
    chat_stop: tuple[str, ...] = (),
    clock: Callable[[], float] = time.monotonic,
    keys: Keys | None = None,
    log: RequestLog | None = None,
    queue_timeout_s: float | None = None,
    verification: Rule = "coupled",
) -> AsyncIterator[LocalServing]:
    """Serve a model, which drafts for itself unless there is another, or a worker of one; `clock`
    is of its health, and `cache` of the targets."""
    models = Models(target=model, draft=draft or model)
    targets = local_targets(model, drafter, cache)
    drafts = LocalWorkers(draft_worker) if draft_worker else model_drafts(models)
    tokenizer = tokenizer or CharacterTokenizer()
    info = targets.info
    grammars = make_compiler(tokenizer, info)
    async with running_loop(
        models,
        gamma=gamma,
        drafts=drafts,
        drafters=drafters_of(
            drafter, drafts, grammars, timeout_s=1.0, max_model_len=info.max_model_len
        ),
        targets=targets,
        options=LoopOptions(recovery_timeout_s=RECOVERY_TIMEOUT_S),
    ) as (loop, _, _):
        health = Health(recovery_timeout_s=RECOVERY_TIMEOUT_S, stall_timeout_s=30.0, clock=clock)
        service = GenerationService(
            ServedModel(
                name="tiny",
                aliases=aliases,
                tokenizer=tokenizer,
                info=info,
                created=1,
                chat_template=chat_template,
                chat_stop=chat_stop,
            ),
            loop,
            AdmissionLimits(
                max_running=max_running, max_waiting=max_waiting, queue_timeout_s=queue_timeout_s
            ),
            health,
            grammars=grammars,
            keys=keys,
            log=log,
            verification=verification,
        )
        yield LocalServing(
            service=service, loop=loop, targets=targets, drafts=drafts, health=health
        )


@asynccontextmanager
async def client_of(serving: LocalServing, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client without a socket."""
    transport = httpx.ASGITransport(serving.app(**options), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def body(**fields: Any) -> dict[str, Any]:
    """The body of a request for a completion of 12 tokens."""
    return {
        "model": "tiny",
        "prompt": "Hello",
        "max_tokens": 12,
        "seed": 3,
        "ignore_eos": True,
        **fields,
    }


def generation_request(**fields: Any) -> GenerationRequest:
    """The neutral form of a request with this body."""
    return CompletionRequest.model_validate(body(**fields)).generation_request()


async def complete(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/completions", json=body(**fields))
    assert response.status_code == 200, response.text
    completion: dict[str, Any] = response.json()
    return completion


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    """The events of a streamed completion."""
    request = body(stream=True, **fields)
    async with client.stream("POST", "/v1/completions", json=request) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def text_of(client: httpx.AsyncClient, **fields: Any) -> str:
    """The text of a completion, whose stream is found to have the same."""
    (choice,) = (await complete(client, **fields))["choices"]
    events = await stream(client, **fields)
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    return choice["text"]  # type: ignore[no-any-return]
