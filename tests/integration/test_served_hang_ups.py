"""Many clients at once, of which some hang up: they leave nothing."""

import asyncio
import contextlib
import json
import random

import grpc
import httpx
from transformers import AutoTokenizer

from cluster import bundled
from deployments.api.tandem_pb2 import GenerateRequest
from deployments.api.tandem_pb2_grpc import GenerationStub
from tests.integration.conftest import HEADERS, METADATA, Served, request


class TestLoad:
    async def test_48_streams_finish_and_those_that_hang_up_leave_nothing(
        self, served: Served, prompts: list[str]
    ) -> None:
        """Prompts of 1 to 1,500 tokens; every fourth client leaves in mid-stream."""
        tokenizer = AutoTokenizer.from_pretrained(bundled.resolve(bundled.TARGET_NAME))
        text_tokens = tokenizer.encode("\n".join(prompts))
        rng = random.Random(0)
        lengths = [1, 2, 1500, 1499] + [int(10 ** rng.uniform(0, 3.17)) for _ in range(44)]
        all_ids = [text_tokens[start : start + n] for start, n in enumerate(lengths)]
        assert [len(ids) for ids in all_ids] == lengths

        async def run(client: httpx.AsyncClient, index: int, *, leaves: bool) -> str:
            body = request(all_ids[index], temperature=0.8, seed=index, ignore_eos=True)
            text = ""
            async with client.stream(
                "POST", "/v1/completions", json={**body, "stream": True}
            ) as response:
                assert response.status_code == 200
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
                        if leaves:
                            break
            return text

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=served.url, headers=HEADERS, timeout=300, limits=limits
        ) as client:
            streams = [run(client, i, leaves=i % 4 == 3) for i in range(48)]
            together = await asyncio.gather(*streams)
            await served.wait_until_nothing_is_held()
            checked = range(0, 48, 9)
            alone = [await run(client, i, leaves=False) for i in checked]
        for index, text in zip(checked, alone, strict=True):
            if index % 4 == 3:
                assert text.startswith(together[index])
            else:
                assert text == together[index]
        await served.wait_until_nothing_is_held()

    async def test_hang_ups_in_the_first_round_leave_nothing(self, served: Served) -> None:
        """Nobody knows yet which replica has the sequence, and the sweep comes after a minute."""
        rng = random.Random(1)
        prompts = [rng.choices(range(10, 4000), k=1500) for _ in range(12)]

        async def leave(client: httpx.AsyncClient, prompt: list[int], after_s: float) -> None:
            body = request(prompt, stream=True, max_tokens=500)  # type: ignore[arg-type]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(after_s):
                    await client.post("/v1/completions", json=body)

        async with httpx.AsyncClient(base_url=served.url, headers=HEADERS, timeout=60) as client:
            for after_s in (0.01, 0.02, 0.04, 0.1, 0.3):
                await asyncio.gather(*[leave(client, prompt, after_s) for prompt in prompts])
        await served.wait_until_nothing_is_held(timeout_s=20)

    async def test_grpc_clients_that_cancel_leave_nothing(
        self, served: Served, prompts: list[str]
    ) -> None:
        """They cancel when a chunk has just come, which is when Serve's own handler misses it."""
        num_tokens = 1000
        await served.set_gamma(0)  # a step makes one token of each stream
        targets = served.handle("TargetGroup")
        before = await targets.status.remote()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
            stub = GenerationStub(channel)

            async def start_and_leave(index: int) -> None:
                call = stub.GenerateStream(
                    GenerateRequest(
                        text=prompts[index], max_tokens=num_tokens, ignore_eos=True, seed=index
                    ),
                    metadata=METADATA,
                )
                for _ in range(index // 4):
                    await call.read()
                call.cancel()

            await asyncio.gather(*[start_and_leave(i) for i in range(32)])
            await served.wait_until_nothing_is_held()
        after = await targets.status.remote()
        assert after.num_steps - before.num_steps < num_tokens / 2  # none ran on to its end
