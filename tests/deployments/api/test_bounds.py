"""What a client may ask for: how many at a time, how long a text, how many bytes."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from deployments.api.body_limit import MAX_DRAINED
from deployments.router.prompts import NUM_THREADS
from tests.deployments.loops import Models
from tests.deployments.serving import (
    MAX_REQUEST_BYTES,
    LocalServing,
    body,
    client_of,
    complete,
    generation_request,
    local_serving,
    stream,
)
from tests.fakes import CharacterTokenizer
from workers.errors import ContextLengthError, TandemError


class SlowTokenizer(CharacterTokenizer):
    """Counts its texts, and holds each until it is let go."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.go_on = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.num_begun += 1
        assert self.go_on.wait(timeout=10)
        return super().encode(text, add_special_tokens=add_special_tokens)


class TestAdmission:
    @pytest.mark.parametrize("is_stream", [False, True])
    async def test_of_a_burst_exactly_those_that_fit_are_let_in(
        self, is_stream: bool, models: Models
    ) -> None:
        async with (
            local_serving(models.target, max_running=4, max_waiting=8) as serving,
            client_of(serving) as client,
        ):
            serving.targets.delay_s = 0.1  # none has ended before the last has come
            request = body(stream=is_stream, max_tokens=4)
            responses = await asyncio.gather(
                *[client.post("/v1/completions", json=request) for _ in range(40)]
            )
            statuses = [response.status_code for response in responses]
            assert (statuses.count(200), statuses.count(429)) == (12, 28)
            await serving.wait_until_nothing_is_held()
            await complete(client)

    async def test_a_refused_request_is_not_tokenized(self, models: Models) -> None:
        tokenizer = SlowTokenizer()
        async with (
            local_serving(
                models.target, max_running=1, max_waiting=0, tokenizer=tokenizer
            ) as serving,
            client_of(serving) as client,
        ):
            first = asyncio.create_task(complete(client))
            while tokenizer.num_begun == 0:
                await asyncio.sleep(0.01)
            refused = await client.post("/v1/completions", json=body())
            assert refused.status_code == 429
            assert tokenizer.num_begun == 1
            tokenizer.go_on.set()
            await first

    async def test_what_can_never_fit_is_told_so(self, models: Models) -> None:
        async with (
            local_serving(models.target, max_running=2, max_waiting=3) as serving,
            client_of(serving) as client,
        ):
            response = await client.post("/v1/completions", json=body(prompt=["a", "b"], n=3))
            assert response.status_code == 400
            assert "6 completions" in response.json()["error"]["message"]
            assert "at most 5 fit" in response.json()["error"]["message"]
            await complete(client, prompt="a", n=5)

    @pytest.mark.parametrize(
        "fields", [{"prompt": ""}, {"prompt": [5, 97]}, {"max_tokens": 300}, {"model": "x"}]
    )
    async def test_a_wrong_request_gives_its_room_back(
        self, fields: dict[str, Any], serving: LocalServing
    ) -> None:
        request = generation_request(**fields)
        with pytest.raises(TandemError):
            async with serving.service.open(request):
                pass
        assert serving.service.num_unfinished == 0

    async def test_what_is_opened_and_never_run_gives_its_room_back(
        self, serving: LocalServing
    ) -> None:
        request = generation_request(n=3)
        async with serving.service.open(request):
            assert serving.service.num_unfinished == 3
        assert serving.service.num_unfinished == 0

    async def test_a_text_that_nobody_reads_on_is_not_written_on(
        self, serving: LocalServing
    ) -> None:
        request = generation_request(n=2, max_tokens=200)
        async with serving.service.open(request) as generation:
            deltas = generation.run()
            await anext(deltas)
        await serving.wait_until_nothing_is_held()  # although nobody has closed the iterator
        await deltas.aclose()

    async def test_a_defect_of_the_round_loop_does_not_leave_a_client_waiting(
        self,
        client: httpx.AsyncClient,
        serving: LocalServing,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def fail(_: object) -> None:
            raise ZeroDivisionError("secret detail")

        monkeypatch.setattr(serving.loop, "add", fail)
        response = await client.post("/v1/completions", json=body(n=2))
        assert response.status_code == 500
        assert "secret" not in response.text
        assert serving.service.num_unfinished == 0

    async def test_a_finished_completion_makes_room_before_its_siblings_end(
        self, serving: LocalServing
    ) -> None:
        request = generation_request(prompt=["Hello", "World"], max_tokens=40)
        held = []
        async with serving.service.open(request) as generation:
            generation.choices = (
                generation.choices[0],
                replace(generation.choices[1], max_tokens=2),
            )
            async for _, delta in generation.run():
                if delta.finish_reason:
                    await asyncio.sleep(0)
                    held.append(serving.service.num_unfinished)
        assert held == [1, 0]


class TestTokenizing:
    async def test_a_client_that_leaves_meanwhile_holds_nothing_and_is_not_read(
        self, models: Models
    ) -> None:
        tokenizer = SlowTokenizer()
        async with local_serving(models.target, tokenizer=tokenizer) as serving:
            request = generation_request(prompt=["a", "b"])

            async def open_and_run() -> None:
                async with serving.service.open(request) as generation:
                    async for _ in generation.run():
                        pass

            num_clients = NUM_THREADS + 3
            clients = [asyncio.create_task(open_and_run()) for _ in range(num_clients)]
            while tokenizer.num_begun < NUM_THREADS:
                await asyncio.sleep(0.01)
            assert serving.service.num_unfinished == 2 * num_clients
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            assert serving.service.num_unfinished == 0
            tokenizer.go_on.set()
            request = generation_request(prompt="c")
            async with serving.service.open(request):
                pass
            # those that were begun were ended after their first text, the others never begun
            assert tokenizer.num_begun == NUM_THREADS + 1

    async def test_a_text_that_cannot_fit_is_not_tokenized(self, models: Models) -> None:
        tokenizer = SlowTokenizer()
        async with local_serving(models.target, tokenizer=tokenizer) as serving:
            request = generation_request(prompt=["a", "b" * 257])
            with pytest.raises(ContextLengthError, match=r"257 characters.* 256 tokens"):
                async with serving.service.open(request):
                    pass
            assert tokenizer.num_begun == 0
            assert serving.service.num_unfinished == 0


class TestBytes:
    @pytest.mark.parametrize("is_chunked", [False, True])
    async def test_a_body_that_is_too_long_is_413(
        self, is_chunked: bool, client: httpx.AsyncClient
    ) -> None:
        num_read = 0

        async def endless() -> AsyncIterator[bytes]:
            nonlocal num_read
            while num_read < 100 * MAX_REQUEST_BYTES:
                num_read += 1000
                yield b"a" * 1000

        headers = {"content-type": "application/json"}
        if is_chunked:
            response = await client.post("/v1/completions", content=endless(), headers=headers)
            assert num_read <= (1 + MAX_DRAINED) * MAX_REQUEST_BYTES + 2000
        else:
            content = b"[" * (MAX_REQUEST_BYTES + 1)
            response = await client.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == 413
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "request_too_large")
        assert f"at most {MAX_REQUEST_BYTES}" in error["message"]
        await complete(client)

    async def test_nothing_is_waited_for_behind_a_body_that_is_too_long(
        self, serving: LocalServing
    ) -> None:
        inbox = [
            {"type": "http.request", "body": b"[" * MAX_REQUEST_BYTES, "more_body": True},
            {"type": "http.request", "body": b"]", "more_body": False},
        ]
        (start, _) = await raw_post(serving, inbox)
        assert start["status"] == 413

    @pytest.mark.parametrize("length", [b"20001", b"9" * 5000])
    async def test_a_stated_length_that_is_too_long_is_413(
        self, length: bytes, serving: LocalServing
    ) -> None:
        inbox = [{"type": "http.request", "body": b"{}", "more_body": False}]
        (start, _) = await raw_post(serving, inbox, [(b"content-length", length)])
        assert start["status"] == 413

    async def test_a_client_that_leaves_before_its_body_has_come_is_forgotten(
        self, serving: LocalServing
    ) -> None:
        inbox = [
            {"type": "http.request", "body": b'{"model":', "more_body": True},
            {"type": "http.disconnect"},
        ]
        assert await raw_post(serving, inbox) == []

    async def test_a_body_that_just_fits_is_read(self, client: httpx.AsyncClient) -> None:
        content = b'{"model": "tiny", "prompt": "Hello"'
        content += b" " * (MAX_REQUEST_BYTES - len(content) - 1) + b"}"
        headers = {"content-type": "application/json"}
        response = await client.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == 200


async def raw_post(
    serving: LocalServing, inbox: list[dict[str, Any]], headers: Any = ()
) -> list[Any]:
    """What is sent to a client that sends just this; nobody may wait for more."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return inbox.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": headers,
    }
    await serving.app()(scope, receive, send)
    assert inbox == []
    return sent


class TestSeeds:
    @pytest.mark.parametrize("temperature", [0, 1])
    async def test_the_seeds_of_choices_wrap(
        self, temperature: int, client: httpx.AsyncClient
    ) -> None:
        both = await complete(client, seed=2**63 - 1, n=2, temperature=temperature)
        last = await complete(client, seed=2**63 - 1, temperature=temperature)
        first = await complete(client, seed=-(2**63), temperature=temperature)
        assert [choice["text"] for choice in both["choices"]] == [
            last["choices"][0]["text"],
            first["choices"][0]["text"],
        ]

    async def test_a_temperature_too_small_to_divide_by_is_greedy(
        self, client: httpx.AsyncClient
    ) -> None:
        greedy = await complete(client, temperature=0)
        for temperature in (1e-320, 1e-38, 9e-6):
            assert (await complete(client, temperature=temperature))["choices"] == greedy["choices"]


SHORT_TIME = {"x-request-timeout-seconds": "0.2"}


class TestTimeout:
    async def test_a_request_whose_time_is_over_is_408(
        self, client: httpx.AsyncClient, serving: LocalServing
    ) -> None:
        serving.targets.delay_s = 0.15
        request = body(max_tokens=200)
        response = await client.post("/v1/completions", json=request, headers=SHORT_TIME)
        assert response.status_code == 408
        assert response.json()["error"]["code"] == "timeout"
        serving.targets.delay_s = 0.0
        await serving.wait_until_nothing_is_held()

    async def test_a_stream_whose_time_is_over_ends_with_an_error_event(
        self, client: httpx.AsyncClient, serving: LocalServing
    ) -> None:
        serving.targets.delay_s = 0.15
        client.headers.update(SHORT_TIME)
        events = await stream(client, max_tokens=200)
        assert events[-1]["error"]["code"] == "timeout"
        serving.targets.delay_s = 0.0
        await serving.wait_until_nothing_is_held()

    @pytest.mark.parametrize("value", ["0", "-1", "60"])
    async def test_a_time_that_is_long_or_none_changes_nothing(
        self, value: str, client: httpx.AsyncClient
    ) -> None:
        client.headers["x-request-timeout-seconds"] = value
        await complete(client)

    @pytest.mark.parametrize("value", ["soon", "nan", "inf", ""])
    async def test_a_time_that_is_none_is_told(self, value: str, client: httpx.AsyncClient) -> None:
        headers = {"x-request-timeout-seconds": value}
        response = await client.post("/v1/completions", json=body(), headers=headers)
        assert response.status_code == 400
        assert "x-request-timeout-seconds" in response.json()["error"]["message"]
