"""The gRPC methods in process; tests/integration calls them through Serve's proxy."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse

from deployments.api.completions import CompletionRequest
from deployments.api.grpc_ingress import GrpcIngress
from deployments.api.tandem_pb2 import (
    DetokenizeRequest,
    GenerateRequest,
    ListModelsRequest,
    TokenIds,
    TokenizeRequest,
)
from deployments.router.admission import Admission, AdmissionLimits
from tests.deployments.serving import (
    MAX_REQUEST_BYTES,
    GrpcContext,
    LocalServing,
    body,
    client_of,
    complete,
    local_serving,
)
from tests.fakes import CharacterTokenizer
from tests.tiny_models import save_quick_model
from workers.errors import OverloadedError, RequestTimeoutError, TandemError
from workers.model import load_model


@pytest.fixture
async def serving(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalServing]:
    name = save_quick_model(tmp_path_factory.mktemp("model"))
    async with local_serving(load_model(name, dtype="float32", device="cpu")) as serving:
        yield serving


async def test_unary_and_stream_are_the_same_text(serving: LocalServing) -> None:
    request = GenerateRequest(text="Hello", max_tokens=12, seed=3, ignore_eos=True)
    context = GrpcContext()
    whole = await serving.rpcs.generate(request, context)
    assert context.code is None
    assert (len(whole.text), len(whole.token_ids)) == (12, 12)
    assert (whole.model, whole.finish_reason) == ("tiny", "length")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 12)
    chunks = [chunk async for chunk in serving.rpcs.generate_stream(request, context)]
    assert len(chunks) > 1
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == list(whole.token_ids)
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [""] * (len(chunks) - 1)
    assert chunks[-1].usage == whole.usage
    assert not chunks[0].HasField("usage")


async def test_fields_mean_the_same_as_over_http(serving: LocalServing) -> None:
    request = GenerateRequest(
        token_ids=TokenIds(ids=[40, 41]),
        max_tokens=20,
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={7: 1.5},
        seed=9,
        stop=["~"],
        ignore_eos=True,
    )
    response = await serving.rpcs.generate(request, GrpcContext())
    async with serving.service.open(
        CompletionRequest(
            model="tiny",
            prompt=[[40, 41]],
            max_tokens=20,
            temperature=0.7,
            top_p=0.9,
            top_k=20,
            min_p=0.01,
            repetition_penalty=1.1,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            logit_bias={7: 1.5},
            seed=9,
            stop=["~"],
            ignore_eos=True,
        ).generation_request()
    ) as generation:
        text = "".join([delta.text async for _, delta in generation.run()])
    assert response.text == text


async def test_absent_fields_have_the_defaults(serving: LocalServing) -> None:
    response = await serving.rpcs.generate(GenerateRequest(text="Hi"), GrpcContext())
    assert response.usage.completion_tokens <= 16


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "prompt is missing"),
        (GenerateRequest(text=""), grpc.StatusCode.INVALID_ARGUMENT, "prompt is empty"),
        (GenerateRequest(text="a", model="x"), grpc.StatusCode.NOT_FOUND, "'tiny'"),
        (
            GenerateRequest(text="a", temperature=3),
            grpc.StatusCode.INVALID_ARGUMENT,
            "temperature is 3.0: it must be a number from 0 to 2",
        ),
        (
            GenerateRequest(text="a", max_tokens=1000),
            grpc.StatusCode.INVALID_ARGUMENT,
            "256 tokens",
        ),
        (
            GenerateRequest(text="a" * MAX_REQUEST_BYTES),
            grpc.StatusCode.INVALID_ARGUMENT,
            "at most 20000 are taken",
        ),
        (
            GenerateRequest(text="a", temperature=float("nan")),
            grpc.StatusCode.INVALID_ARGUMENT,
            "temperature is nan: it must be a number from 0 to 2",
        ),
    ],
    ids=str,
)
async def test_wrong_requests_set_the_status(
    request_: GenerateRequest, code: grpc.StatusCode, words: str, serving: LocalServing
) -> None:
    for streamed in (False, True):
        context = GrpcContext()
        if streamed:
            stream = serving.rpcs.generate_stream(request_, context)
            with pytest.raises(TandemError):
                await anext(stream)
        else:
            await serving.rpcs.generate(request_, context)
        assert context.code is code
        assert words in context.details


async def test_who_is_refused_for_now_is_told_when_to_come_back(serving: LocalServing) -> None:
    """As over HTTP; a stream through Serve's proxy too, which loses the metadata of an error."""
    capacity = AdmissionLimits(max_running=1, max_waiting=1)
    serving.service._admission = Admission(capacity)
    serving.targets.delay_s = 0.2
    request = GenerateRequest(text="Hello", max_tokens=2)
    running = [asyncio.create_task(serving.rpcs.generate(request, GrpcContext())) for _ in range(2)]
    while serving.service.num_unfinished < 2:
        await asyncio.sleep(0.01)
    async with client_of(serving) as client:
        headers = (await client.post("/v1/completions", json=body())).headers
    expected = {name: headers[name] for name in ("retry-after", "retry-after-ms")}
    whole, streamed = GrpcContext(), GrpcContext()
    await serving.rpcs.generate(request, whole)
    ingress = GrpcIngress()
    ingress._rpcs = serving.rpcs
    stream = ingress.GenerateStream(request, streamed)  # type: ignore[arg-type]
    first = await anext(stream)
    assert first.SerializeToString() == b""
    assert streamed.trailing == expected
    with pytest.raises(OverloadedError):
        await anext(stream)
    assert whole.trailing == expected
    assert whole.code is streamed.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    await asyncio.gather(*running)


async def test_no_traceback_reaches_a_client(
    serving: LocalServing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(serving.service, "open", fail)
    context = GrpcContext()
    await serving.rpcs.generate(GenerateRequest(text="a"), context)
    assert context.code is grpc.StatusCode.INTERNAL
    assert context.details == "internal error; the server's log says more"


async def test_closing_a_stream_frees_everything(serving: LocalServing) -> None:
    request = GenerateRequest(text="Hello", max_tokens=200, seed=3, ignore_eos=True)
    stream = serving.rpcs.generate_stream(request, GrpcContext())
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    async with asyncio.timeout(5):
        while serving.loop.num_live or serving.targets.num_used_blocks:
            await asyncio.sleep(0.01)


async def test_a_deadline_ends_the_request_and_frees_everything(serving: LocalServing) -> None:
    """The proxy says how long the client waits; a whole answer and a stream both obey."""
    request = GenerateRequest(text="Hello", max_tokens=200, ignore_eos=True)
    serving.targets.delay_s = 0.05  # for each round
    for is_stream in (False, True):
        context = GrpcContext(x_tandem_timeout_seconds="0.100")
        if is_stream:
            with pytest.raises(RequestTimeoutError):
                async for _ in serving.rpcs.generate_stream(request, context):
                    pass
        else:
            await serving.rpcs.generate(request, context)
        assert context.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "not finished within 0.1 s" in context.details
        await serving.wait_until_nothing_is_held()


async def test_tokens_of_a_text_and_back(serving: LocalServing) -> None:
    context = GrpcContext()
    asked = TokenizeRequest(prompt="Hello", return_token_strs=True)
    tokenized = await serving.rpcs.tokenize(asked, context)
    assert list(tokenized.tokens) == CharacterTokenizer().encode("Hello")
    assert (tokenized.count, tokenized.max_model_len) == (5, 256)
    assert list(tokenized.token_strs) == list("Hello")
    back = await serving.rpcs.detokenize(DetokenizeRequest(tokens=tokenized.tokens), context)
    assert back.prompt == "Hello"
    plain = await serving.rpcs.tokenize(TokenizeRequest(prompt="Hi", model="tiny"), context)
    assert not plain.token_strs
    assert context.code is None


async def test_the_served_model_is_listed(serving: LocalServing) -> None:
    listed = await serving.rpcs.list_models(ListModelsRequest(), GrpcContext())
    (model,) = listed.models
    assert (model.id, model.created, model.max_model_len) == ("tiny", 1, 256)


async def test_wrong_requests_about_tokens_set_the_status(serving: LocalServing) -> None:
    context = GrpcContext()
    await serving.rpcs.tokenize(TokenizeRequest(prompt="a", model="x"), context)
    assert context.code is grpc.StatusCode.NOT_FOUND
    await serving.rpcs.detokenize(DetokenizeRequest(tokens=[1, 97]), context)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "tokens has token id 97; ids go from 0 to 96" in context.details
    await serving.rpcs.tokenize(TokenizeRequest(prompt="a" * MAX_REQUEST_BYTES), context)
    assert "at most 20000 are taken" in context.details


async def test_health_is_that_of_the_targets(serving: LocalServing) -> None:
    assert serving.rpcs.health().status == HealthCheckResponse.SERVING
    serving.health.target_failed("gone")
    serving.health.target_failed("gone")
    assert serving.rpcs.health().status == HealthCheckResponse.NOT_SERVING


async def test_several_completions_are_those_of_http(serving: LocalServing) -> None:
    request = GenerateRequest(text="Hello", max_tokens=12, seed=3, n=3, ignore_eos=True)
    whole = await serving.rpcs.generate(request, GrpcContext())
    by_http = CompletionRequest(
        model="tiny", prompt="Hello", max_tokens=12, seed=3, n=3, ignore_eos=True
    )
    async with serving.service.open(by_http.generation_request()) as generation:
        expected = [delta.text for delta in await generation.complete()]
    assert [completion.text for completion in whole.completions] == expected
    assert len({*expected}) == 3
    assert whole.text == expected[0]
    assert list(whole.token_ids) == list(whole.completions[0].token_ids)
    assert whole.usage.completion_tokens == 36
    texts = ["", "", ""]
    usages = 0
    async for chunk in serving.rpcs.generate_stream(request, GrpcContext()):
        texts[chunk.index] += chunk.text
        usages += chunk.HasField("usage")
        last = chunk
    assert texts == expected
    assert usages == 1
    assert last.usage.completion_tokens == 36


async def test_log_probabilities_and_the_prompt_are_those_of_http(serving: LocalServing) -> None:
    fields = {
        "max_tokens": 6,
        "seed": 3,
        "ignore_eos": True,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "echo": True,
    }
    whole = await serving.rpcs.generate(GenerateRequest(text="Hello", **fields), GrpcContext())
    async with client_of(serving) as client:
        (expected,) = (await complete(client, **fields))["choices"]
    (completion,) = whole.completions
    assert whole.text == completion.text == expected["text"]
    records = [*completion.prompt, *completion.tokens]
    logprobs = [record.logprob if record.HasField("logprob") else None for record in records]
    assert logprobs == expected["logprobs"]["token_logprobs"]
    assert [record.id for record in completion.tokens] == list(completion.token_ids)
    assert "".join(record.text for record in records) == completion.text
    assert [len(record.top_logprobs) for record in completion.tokens] == [2] * 6
    request = GenerateRequest(text="Hello", **fields)
    chunks = [c async for c in serving.rpcs.generate_stream(request, GrpcContext())]
    assert [record for chunk in chunks for record in chunk.tokens] == list(completion.tokens)
    assert list(chunks[0].prompt) == list(completion.prompt)
    assert "".join(chunk.text for chunk in chunks) == completion.text


async def test_only_what_is_asked_for_is_told(serving: LocalServing) -> None:
    request = GenerateRequest(text="Hello", max_tokens=4, ignore_eos=True)
    (completion,) = (await serving.rpcs.generate(request, GrpcContext())).completions
    assert (len(completion.token_ids), len(completion.tokens), len(completion.prompt)) == (4, 0, 0)


async def test_a_prediction_is_drafted_from(serving: LocalServing) -> None:
    request = GenerateRequest(text="Hello", max_tokens=40, temperature=0, ignore_eos=True)
    plain = await serving.rpcs.generate(request, GrpcContext())
    request.prediction.content = plain.text
    predicted = await serving.rpcs.generate(request, GrpcContext())
    assert predicted.text == plain.text
    assert 20 < predicted.usage.accepted_prediction_tokens < 40


async def test_usage_has_the_counts_of_speculation(serving: LocalServing) -> None:
    request = GenerateRequest(text="Hello", max_tokens=12, temperature=0, ignore_eos=True)
    usage = (await serving.rpcs.generate(request, GrpcContext())).usage
    assert usage.speculation.accepted_tokens == usage.accepted_prediction_tokens > 0
    assert sum(usage.speculation.accepted_by_position) == usage.speculation.accepted_tokens
    assert usage.speculation.tokens_per_verify > 1
    request.speculation.mode = "off"
    usage = (await serving.rpcs.generate(request, GrpcContext())).usage
    assert usage.speculation.rounds == 0
    assert not usage.speculation.HasField("tokens_per_verify")
