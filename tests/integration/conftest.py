"""One Ray, one Serve, and the bundled pair served in fp32, for all tests of this folder."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import ray
from ray import serve

from cluster.bench.server import free_port
from cluster.demo.corpus import Corpus, held_out_prompts
from deployments import AppArgs, app, build

APP = "tandem"
MODEL = "tandem-demo"
METRICS_REPORT_MS = 1000
"""How late a metric may be; Ray's default is 10 s."""


@dataclass(frozen=True)
class Served:
    """A running app and the ways to reach it."""

    http_port: int
    grpc_port: int
    metrics_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0)

    def handle(self, deployment: str) -> Any:
        return serve.get_deployment_handle(deployment, APP)

    async def set_gamma(self, gamma: int | str) -> None:
        """Change the draft length of the running router."""
        await self.handle("Router").reconfigure.remote({"gamma": gamma})

    async def num_held(self) -> dict[str, int]:
        """What the app holds for its clients, over all its parts."""
        held = {"live": await self.handle("Router").num_live.remote()}
        for deployment in ("TargetGroup", "DraftPool"):
            status = await self.handle(deployment).status.remote()
            held[f"{deployment} sequences"] = status.num_sequences
            held[f"{deployment} blocks"] = status.num_used_blocks
            held[f"{deployment} waiting"] = status.num_waiting
        return held

    async def wait_until_nothing_is_held(self, timeout_s: float = 60.0) -> float:
        """Returns how long it took, in seconds."""
        started = time.monotonic()
        while any((held := await self.num_held()).values()):
            assert time.monotonic() < started + timeout_s, held
            await asyncio.sleep(0.05)
        return time.monotonic() - started


@pytest.fixture(scope="session")
def ports() -> Iterator[Served]:
    served = Served(http_port=free_port(), grpc_port=free_port(), metrics_port=free_port())
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=200 * 1024**2,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _metrics_export_port=served.metrics_port,
        _system_config={"metrics_report_interval_ms": METRICS_REPORT_MS},
        namespace="serve",
    )
    yield served
    serve.shutdown()
    ray.shutdown()


Deploy = Callable[..., Served]


def wait_until_compiled(served: Served, args: AppArgs) -> None:
    """The tests are of the compiled forwards; the models' own are tested with the workers."""
    deployments = ["TargetGroup"] if args.draft_model is None else ["TargetGroup", "DraftPool"]

    def wait() -> None:
        for deployment in deployments:
            while served.handle(deployment).status.remote().result().is_compiling:
                time.sleep(0.2)

    with ThreadPoolExecutor() as threads:  # not on the event loop that a test may run on
        threads.submit(wait).result()


@pytest.fixture(scope="session")
def deploy(ports: Served) -> Deploy:
    """Run the app with options, in place of the one that runs."""
    running: list[AppArgs] = []

    def run(**options: Any) -> Served:
        args = AppArgs(
            http_port=ports.http_port,
            grpc_port=ports.grpc_port,
            **{"dtype": "float32", "target_num_threads": 1, "overlap": "on", **options},
        )
        if running and running[-1] == args:
            return ports
        application = build(args) if running else app(args)
        if running:
            serve.delete(APP)
        serve.run(application, name=APP)
        wait_until_compiled(ports, args)
        running.append(args)
        return ports

    return run


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    return held_out_prompts(Corpus.load(), 50)


@pytest.fixture
def http(ports: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=ports.url, timeout=120) as client:
        yield client
