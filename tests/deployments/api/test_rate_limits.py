"""What a key may ask for: how much, how often, and how much at a time."""

import asyncio
import threading
from typing import Any

import grpc
import httpx
import pytest

from deployments.api.auth import rate_limit_headers
from deployments.api.tandem_pb2 import DetokenizeRequest, TokenizeRequest
from deployments.router.tenants.account import RateLimit, RateLimits
from deployments.router.tenants.keys import Keys
from tests.deployments.api.keys import BEARER, LIMITED, SECRET, ring_of
from tests.deployments.loops import Models
from tests.deployments.serving import GrpcContext, body, client_of, complete, local_serving
from tests.fakes import CharacterTokenizer


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
