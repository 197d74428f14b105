"""One `tandem serve` of the bundled pair in fp32, for all tests of this folder.

It ends with their last one: even at rest it takes a quarter of two cores.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import ray
import torch
from ray import serve
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster import bundled
from deployments.api.tandem_pb2 import GenerateChunk, GenerateRequest, Speculation
from deployments.api.tandem_pb2_grpc import GenerationStub
from tandem.demo.corpus import Corpus, held_out_prompts
from tandem.live.server import free_port, wait_until_compiled
from tests.integration.tandem_serve import TandemServe, tandem_serve
from workers.model import load_model
from workers.sampling_params import SamplingParams
from workers.target import Target
from workers.types import VerifyRequest

APP = "default"
MODEL = "tandem-demo"
KEY = "sk-of-alice-0123456789"
"""The key that all tests send."""
RARE_KEY = "sk-of-carol-0123456789"
"""May ask once in 100 seconds."""
HEADERS = {"Authorization": f"Bearer {KEY}"}
METADATA = (("authorization", f"Bearer {KEY}"),)
KEYS = f"""\
keys:
- {{name: alice, key: {KEY}}}
- {{name: carol, key: {RARE_KEY}, requests_per_second: 0.01}}
"""
"""A key file."""
NUM_TOKENS = 32
"""The number of tokens of each completion."""
OPTIONS = {"dtype": "float32", "target_num_threads": 1, "overlap": "on"}
"""The options of all apps."""


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
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

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


@pytest.fixture(scope="package")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(KEYS)
    return path


@pytest.fixture(scope="package")
def server(key_file: Path) -> Iterator[TandemServe]:
    options = {
        **OPTIONS,
        "http_port": free_port(),
        "grpc_port": free_port(),
        "api_keys_file": key_file,
    }
    with tandem_serve(options, key_file.with_name("output")) as server:
        yield server


@pytest.fixture(scope="package")
def served(server: TandemServe) -> Served:
    """The app that it has started, once its forwards are compiled: those of the models themselves
    are tested with the workers."""
    with ThreadPoolExecutor() as threads:  # not on the event loop that a test may run on
        threads.submit(wait_until_compiled).result()
    (node,) = ray.nodes()
    return Served(
        http_port=int(server.options["http_port"]),
        grpc_port=int(server.options["grpc_port"]),
        metrics_port=node["MetricsExportPort"],
    )


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    return held_out_prompts(Corpus.load(), 50)


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, headers=HEADERS, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def greedy_texts(prompts: list[str]) -> list[str]:
    """What transformers writes with the same target to the first prompts, one at a time."""
    name = bundled.resolve(bundled.TARGET_NAME)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(name)
    texts = []
    for prompt in prompts[:12]:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
        new_tokens = output[0, inputs.input_ids.shape[1] :]
        texts.append(tokenizer.decode(new_tokens, skip_special_tokens=True))
    return texts


@pytest.fixture(scope="session")
def sampled_tokens(prompts: list[str]) -> list[list[int]]:
    """What the target alone samples, without Ray, drafts or batches; prompt i has seed i."""
    name = bundled.resolve(bundled.TARGET_NAME)
    target = Target(load_model(name, dtype="float32", device="cpu"))
    tokenizer = AutoTokenizer.from_pretrained(name)
    all_tokens = []
    for seed, prompt in enumerate(prompts[:16]):
        tokens = tokenizer.encode(prompt)
        prompt_len, cached_len = len(tokens), 0
        while len(tokens) < prompt_len + NUM_TOKENS:
            (result,) = target.verify(
                [
                    VerifyRequest(
                        seq_id="s",
                        base_len=cached_len,
                        new_tokens=tuple(tokens[cached_len:]),
                        prompt_len=prompt_len,
                        sampling=SamplingParams(temperature=0.8),
                        seed=seed,
                    )
                ]
            )
            cached_len = len(tokens)
            tokens += result.tokens
        target.release(["s"])
        all_tokens.append(tokens[prompt_len:])
    return all_tokens


def request(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": NUM_TOKENS, **fields}


async def served_tokens(
    served: Served,
    prompts: list[str],
    *,
    concurrency: int,
    on_chunk: Callable[[GenerateChunk], None] = lambda _: None,
    mode: str = "auto",
    num_tokens: int = NUM_TOKENS,
) -> list[list[int]]:
    """Token ids over streaming gRPC, at temperature 0.8; `on_chunk` is told each chunk.

    `mode` says who drafts.
    """
    slots = asyncio.Semaphore(concurrency)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        stub = GenerationStub(channel)

        async def run(seed: int, prompt: str) -> list[int]:
            generate = GenerateRequest(
                text=prompt,
                max_tokens=num_tokens,
                temperature=0.8,
                seed=seed,
                ignore_eos=True,
                speculation=Speculation(mode=mode),
            )
            tokens: list[int] = []
            async with slots:
                async for chunk in stub.GenerateStream(generate, metadata=METADATA):
                    tokens += chunk.token_ids
                    on_chunk(chunk)
            return tokens

        return await asyncio.gather(*[run(i, prompt) for i, prompt in enumerate(prompts)])


async def served_texts(served: Served, prompts: list[str], *, concurrency: int) -> list[str]:
    """Greedy texts over HTTP."""
    slots = asyncio.Semaphore(concurrency)
    async with served.openai() as client:

        async def run(prompt: str) -> str:
            async with slots:
                completion = await client.completions.create(**request(prompt, temperature=0))
                return completion.choices[0].text

        return await asyncio.gather(*[run(prompt) for prompt in prompts])
