"""The bundled pair, served by Ray Serve over HTTP and gRPC, in fp32."""

import asyncio
import re

import grpc
import httpx
import psutil
import pytest
from transformers import AutoTokenizer

from cluster import bundled
from deployments.api.tandem_pb2 import ChatMessage, ChatRequest, GenerateChunk, GenerateRequest
from deployments.api.tandem_pb2_grpc import GenerationStub
from tests.integration.conftest import (
    APP,
    METADATA,
    MODEL,
    NUM_TOKENS,
    Served,
    request,
    served_texts,
    served_tokens,
)
from tests.integration.mixed import answers, speculation_of, token_ids
from tests.integration.tandem_serve import METRICS_REPORT_MS
from tests.laws import TEXT_LEN, law_of_texts, only, pvalue


class TestExactness:
    async def test_greedy_texts_equal_transformers_generate(
        self, served: Served, prompts: list[str], greedy_texts: list[str]
    ) -> None:
        texts = await served_texts(served, prompts[: len(greedy_texts)], concurrency=8)
        assert texts == greedy_texts
        assert len(set(texts)) > 10

    @pytest.mark.parametrize(
        ("gamma", "concurrency"),
        [(0, 16), (1, 16), (8, 16), ("dynamic", 16), (4, 1)],
    )
    async def test_sampled_tokens_equal_the_target_alone(
        self,
        gamma: int | str,
        concurrency: int,
        served: Served,
        prompts: list[str],
        sampled_tokens: list[list[int]],
    ) -> None:
        await served.set_gamma(gamma)
        chunks: list[GenerateChunk] = []
        tokens = await served_tokens(
            served, prompts[:16], concurrency=concurrency, on_chunk=chunks.append
        )
        assert tokens == sampled_tokens
        num_accepted = sum(chunk.usage.accepted_prediction_tokens for chunk in chunks)
        if gamma != "dynamic":  # it drafts as much as pays here and now, which may be nothing
            assert (num_accepted > 0) == (gamma != 0)

    async def test_rules_that_compare_laws_keep_the_targets(self, served: Served) -> None:
        await served.set_gamma(3)
        name = bundled.resolve(bundled.TARGET_NAME)
        tokenizer = AutoTokenizer.from_pretrained(name)
        words = [token for word in (" or", " of", " and") for token in tokenizer.encode(word)]
        prompt, params = "the value of", only(words, temperature=2.0, presence_penalty=1.0)
        law = law_of_texts(name, tuple(tokenizer.encode(prompt)), params)
        asked = request(
            prompt,
            temperature=params.temperature,
            presence_penalty=params.presence_penalty,
            logit_bias={str(token): bias for token, bias in params.logit_bias},
            n=64,
            return_token_ids=True,
        ) | {"max_tokens": TEXT_LEN}
        counts = []
        for rule in ("rejection", "block"):
            bodies = [
                {**asked, "seed": seed, "speculation": {"verification": rule}}
                for seed in range(0, 4 * 64, 64)  # each completion has the next
            ]
            completions = await answers(served, bodies)
            texts = [tuple(ids) for completion in completions for ids in token_ids(completion)]
            assert pvalue(texts, law) > 1e-3, rule
            counts += map(speculation_of, completions)
        num_tested = sum(count["tested_tokens"] for count in counts)
        assert 0 < sum(count["accepted_tokens"] for count in counts) < num_tested


class TestClients:
    async def test_openai_streams_a_completion(
        self, served: Served, prompts: list[str], greedy_texts: list[str]
    ) -> None:
        async with served.openai() as client:
            stream = await client.completions.create(
                **request(prompts[0], temperature=0),
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
        text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        assert text == greedy_texts[0]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == NUM_TOKENS
        assert len(chunks) > 5

    async def test_openai_streams_a_chat(self, served: Served) -> None:
        """By the bundled target's own template: what it writes to the rendered prompt."""
        messages = [{"role": "user", "content": "A class for a stack."}]
        chat = {"model": MODEL, "messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0}
        async with served.openai() as client:
            stream = await client.chat.completions.create(
                **chat, stream=True, extra_body={"ignore_eos": True}
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        tokenizer = AutoTokenizer.from_pretrained(bundled.resolve(bundled.TARGET_NAME))
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert ["".join(pieces)] == await served_texts(served, [prompt], concurrency=1)

    async def test_openai_lists_the_model(self, served: Served) -> None:
        async with served.openai() as client:
            assert [model.id for model in (await client.models.list()).data] == [MODEL]

    async def test_grpc_text_equals_http(
        self, served: Served, prompts: list[str], greedy_texts: list[str]
    ) -> None:
        await served.set_gamma(4)
        with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
            stub = GenerationStub(channel)
            generate = GenerateRequest(text=prompts[1], max_tokens=NUM_TOKENS, temperature=0)
            whole = stub.Generate(generate, metadata=METADATA, timeout=60)
            chunks = list(stub.GenerateStream(generate, metadata=METADATA, timeout=60))
        assert whole.text == greedy_texts[1]
        assert "".join(chunk.text for chunk in chunks) == greedy_texts[1]
        assert len(chunks) > 5
        assert whole.usage.accepted_prediction_tokens > 0

    async def test_grpc_chats_equal_those_of_http(self, served: Served) -> None:
        message = {"role": "user", "content": "A class for a stack."}
        fields = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
        async with served.openai() as client:
            chat = await client.chat.completions.create(
                model=MODEL,
                messages=[message],  # type: ignore[list-item]
                extra_body=fields,
            )
        asked = ChatRequest(messages=[ChatMessage(**message)], **fields)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
            stub = GenerationStub(channel)
            whole = await stub.Chat(asked, metadata=METADATA, timeout=60)
            chunks = [
                chunk async for chunk in stub.ChatStream(asked, metadata=METADATA, timeout=60)
            ]
        (choice,) = whole.choices
        assert choice.message.content == chat.choices[0].message.content
        assert "".join(chunk.content for chunk in chunks) == choice.message.content
        assert len(chunks) > 5
        assert whole.usage.completion_tokens == NUM_TOKENS

    def test_errors_come_through(self, served: Served, http: httpx.Client) -> None:
        response = http.post("/v1/completions", json=request("a", temperature=9))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "temperature"
        assert http.post("/v1/completions", json={**request("a"), "model": "x"}).status_code == 404
        with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
            stub = GenerationStub(channel)
            for call in (stub.Generate, lambda *r, **more: list(stub.GenerateStream(*r, **more))):
                with pytest.raises(grpc.RpcError) as caught:
                    call(GenerateRequest(text="a", temperature=9), metadata=METADATA)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert caught.value.details() == (
                    "temperature is 9.0: it must be a number from 0 to 2"
                )

    def test_a_prompt_may_be_longer_than_messages_of_grpc_as_a_rule(self, served: Served) -> None:
        """The proxy passes it on in one; then it is longer than the app takes."""
        text = "a " * (2**21 + 1)
        with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
            with pytest.raises(grpc.RpcError) as caught:
                GenerationStub(channel).Generate(GenerateRequest(text=text), metadata=METADATA)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "the option max_request_bytes" in str(caught.value.details())


def counters(served: Served) -> dict[str, float]:
    """Totals of our metrics at the Prometheus endpoint, over all label sets."""
    text = httpx.get(f"http://127.0.0.1:{served.metrics_port}/metrics").text
    totals: dict[str, float] = {}
    for name, value in re.findall(r"^ray_(tandem_\w+)\{.*\} (\S+)$", text, re.MULTILINE):
        totals[name] = totals.get(name, 0.0) + float(value)
    return totals


async def test_the_counters_move_as_the_usage_says(
    served: Served, prompts: list[str], http: httpx.Client
) -> None:
    await served.set_gamma(4)
    prefix = "tandem_spec_decode_"
    last: dict[str, float] = {}  # gauges that are told nothing new are missing after a second

    def read() -> dict[str, float]:
        now = counters(served)
        last.update(now)
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_tested_tokens",
                 "num_accepted_tokens_per_pos")  # fmt: skip
        return {name: now.get(f"{prefix}{name}_total", 0.0) for name in names}

    async def settled() -> dict[str, float]:
        """Metrics arrive late, by one period of their report and one of the collector."""
        before, num_alike = read(), 0
        while num_alike < 6:
            await asyncio.sleep(METRICS_REPORT_MS / 2000)
            now = read()
            before, num_alike = now, num_alike + 1 if now == before else 0
        return before

    for _ in range(3):  # Ray sends increments once: those that miss its agent are lost
        before = await settled()
        response = await asyncio.to_thread(
            http.post, "/v1/completions", json=request(prompts[2], temperature=0)
        )
        if (after := await settled()) != before:
            break
    details = response.json()["usage"]["completion_tokens_details"]
    accepted, rejected = (
        details["accepted_prediction_tokens"],
        details["rejected_prediction_tokens"],
    )
    moved = {name: after[name] - before[name] for name in after}
    assert moved["num_accepted_tokens"] == accepted > 0
    assert moved["num_draft_tokens"] == accepted + rejected
    assert moved["num_accepted_tokens_per_pos"] == accepted
    assert accepted <= moved["num_tested_tokens"] <= accepted + rejected
    assert 0 < moved["num_drafts"] < NUM_TOKENS
    # gauges are at rest once everything is, with what is told last
    async with asyncio.timeout(30):
        while any(last.get(gauge, 1.0) for gauge in ("tandem_gamma", "tandem_num_live_sequences")):
            await asyncio.sleep(0.1)
            read()


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(("deployment", "has_torch"), [("Router", False), ("DraftPool", True)])
def test_a_router_does_without_torch(deployment: str, has_torch: bool) -> None:
    """Which takes 250 MB and seconds of its start."""
    replicas = [
        process
        for process in psutil.Process().children(recursive=True)
        if f"ServeReplica:{APP}:{deployment}" in " ".join(process.cmdline())
    ]
    assert replicas
    for replica in replicas:
        loaded = [region.path for region in replica.memory_maps() if "libtorch" in region.path]
        assert bool(loaded) == has_torch
