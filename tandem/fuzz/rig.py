"""All of the app but Ray, in this process: HTTP, the round loop, and workers on streams."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import httpx

from deployments.api import chat, completions
from deployments.api.http import HttpOptions, make_app
from deployments.metrics import RouterMetrics
from deployments.replicas.step_loop import StepLoop
from deployments.router.admission import AdmissionLimits
from deployments.router.chat.template import ChatTemplate
from deployments.router.drafting.chain import make_drafters
from deployments.router.drafting.overlap import make_overlap
from deployments.router.drafting.remote import PooledDrafter
from deployments.router.grammars import make_compiler
from deployments.router.health import Health
from deployments.router.loop import LoopOptions, RoundLoop
from deployments.router.policy.controller import make_controller
from deployments.router.service import GenerationService, ServedModel
from deployments.router.speculation import Policies
from deployments.router.tenants.keys import Keys
from deployments.router.tokenizer import Tokenizer
from deployments.transport.messages import (
    PROPOSE,
    VERIFY,
    Codec,
    ReplicaReport,
    StreamAddress,
)
from deployments.transport.stream_server import StreamServer
from deployments.transport.worker_streams import WorkerStreams
from tandem.fuzz.cases import Body
from tandem.fuzz.keys import KEY, RING
from tandem.fuzz.outcome import Outcome, outcome_of
from workers.drafters.model import ModelDrafter
from workers.model import Model
from workers.paged_model import CacheOptions
from workers.step_worker import StepWorker
from workers.target import Target
from workers.types import WorkRequest, WorkResult

RequestT = TypeVar("RequestT", bound=WorkRequest)
ResultT = TypeVar("ResultT", bound=WorkResult)

MODEL_NAME = "fuzzed"
LOGGERS = ("deployments", "workers")
MAX_GAMMA = 8
MAX_BATCHED_TOKENS = 32
"""Small, so that prompts take several steps."""
MAX_REQUEST_BYTES = 2**20
REST_TIMEOUT_S = 10.0
DRAFT_TIMEOUT_S = 10.0
DRAFTERS = ("prompt_lookup", "model", "early_exit", "suffix")
"""The suffixes last: they know texts that were written before, so that no draft would be wrong."""
EARLY_EXIT_LAYER = 1
OPTIONS = LoopOptions(verify_timeout_s=30.0, recovery_timeout_s=2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The models and the tokenizer that are fuzzed."""

    target: Model
    draft: Model
    tokenizer: Tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The tokenizer's own chat template, if it has one."""
        tokenizer: Any = self.tokenizer
        has_template = getattr(tokenizer, "chat_template", None) is not None
        return ChatTemplate(tokenizer) if has_template else None

    @property
    def cache(self) -> CacheOptions:
        return CacheOptions(block_size=4, max_model_len=256, max_num_seqs=32)


class _LocalWorker(Generic[RequestT, ResultT]):
    """One worker, behind a stream, and the directory that knows of it."""

    def __init__(
        self, make: Callable[[], StepWorker[RequestT, ResultT]], codec: Codec[RequestT, ResultT]
    ) -> None:
        self.replica_id = f"local-{id(self):x}"
        self.loop: StepLoop[RequestT, ResultT] = StepLoop(
            make, idle_timeout_s=3600.0, clock=time.monotonic, replica_id=self.replica_id
        )
        self._server = StreamServer(codec, run=self.loop.submit, release=self.loop.release)
        self._address: StreamAddress | None = None

    async def replicas(self) -> list[ReplicaReport]:
        if self._address is None:
            self._address = await self._server.start("127.0.0.1", self.replica_id)
        return [ReplicaReport(address=self._address, num_cached_tokens=0)]

    async def close(self) -> None:
        self._server.close()
        await self.loop.close()


class _Complaints(logging.Handler):
    """Collects what the app logs at the level of a warning or above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.heard.append(
            f"{record.name}: {record.getMessage()}" + (f": {error!r}" if error else "")
        )


class Rig:
    """An app that serves, and can be asked what it holds."""

    def __init__(self, subject: Subject) -> None:
        self._complaints = _Complaints()
        for name in LOGGERS:
            logging.getLogger(name).addHandler(self._complaints)
        cache = subject.cache

        def make_target() -> Target:
            return Target(
                subject.target,
                cache,
                max_batched_tokens=MAX_BATCHED_TOKENS,
                early_exit_layer=EARLY_EXIT_LAYER,
            )

        self._target = _LocalWorker(make_target, VERIFY)
        self._draft = _LocalWorker(lambda: ModelDrafter(subject.draft, cache), PROPOSE)
        self._clients = (
            WorkerStreams(self._target, VERIFY),
            WorkerStreams(self._draft, PROPOSE),
        )
        info = self._target.loop.worker.info
        grammars = make_compiler(subject.tokenizer, info)
        pool = PooledDrafter(
            self._clients[1], timeout_s=DRAFT_TIMEOUT_S, max_model_len=info.max_model_len
        )
        self._loop = RoundLoop(
            targets=self._clients[0],
            drafters=make_drafters(DRAFTERS, pool, grammars),
            policies=Policies(
                gamma=make_controller(0),
                overlap=make_overlap("off"),
                max_gamma=MAX_GAMMA,
                max_model_len=info.max_model_len,
            ),
            observer=RouterMetrics(),
            options=OPTIONS,
            clock=time.monotonic,
        )
        self.service = GenerationService(
            ServedModel(
                name=MODEL_NAME,
                tokenizer=subject.tokenizer,
                info=info,
                created=1,
                chat_template=subject.chat_template,
            ),
            self._loop,
            AdmissionLimits(max_running=24, max_waiting=1000),
            Health(recovery_timeout_s=60.0, stall_timeout_s=60.0, clock=time.monotonic),
            grammars=grammars,
            keys=Keys(RING),
        )
        http = make_app(self.service, HttpOptions(max_request_bytes=MAX_REQUEST_BYTES))
        transport = httpx.ASGITransport(http, raise_app_exceptions=False)
        self._http = httpx.AsyncClient(
            transport=transport,
            base_url="http://fuzzed",
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=60.0,
        )

    def use_gamma(self, gamma: Any) -> None:
        """Go on with another draft length: a number, 0 for no drafts, or "dynamic"."""
        self._loop.use_gamma(make_controller(gamma))

    async def ask(self, body: Body) -> Outcome:
        endpoint = chat if "messages" in body else completions
        response = await self._http.post(endpoint.PATH, json=body)
        if response.status_code != 200:
            return Outcome(status=response.status_code, error=response.text)
        if not body.get("stream"):
            return outcome_of([response.json()])
        lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
        if lines[-1] != "[DONE]":
            return Outcome(status=500, error="the stream has no end")
        return outcome_of([json.loads(line) for line in lines[:-1]])

    def take_complaints(self) -> list[str]:
        """Warnings and errors since the last call."""
        heard = self._complaints.heard[:]
        self._complaints.heard.clear()
        return heard

    async def what_is_held(self) -> str | None:
        """Sequences and blocks that are still held after a while, though no request runs."""
        deadline = time.monotonic() + REST_TIMEOUT_S
        while (held := self._held()) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        for worker in (self._target, self._draft):
            worker.loop.worker.check_integrity()
        return held

    def _held(self) -> str | None:
        numbers = {"live sequences of the router": self._loop.num_live}
        for name, worker in (("target", self._target), ("drafter", self._draft)):
            if worker.loop.failure is not None:
                return f"the {name} has failed: {worker.loop.failure!r}"
            numbers[f"sequences of the {name}"] = worker.loop.worker.num_sequences
            numbers[f"blocks of the {name}"] = worker.loop.worker.num_used_blocks
        return ", ".join(f"{number} {name}" for name, number in numbers.items() if number) or None

    async def close(self) -> None:
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(self._complaints)
        await self._http.aclose()
        await self._loop.close()
        for client in self._clients:
            client.close()
        await self._target.close()
        await self._draft.close()


@asynccontextmanager
async def open_rig(subject: Subject) -> AsyncIterator[Rig]:
    rig = Rig(subject)
    try:
        yield rig
    finally:
        await rig.close()
