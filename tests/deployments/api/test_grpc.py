"""The gRPC methods in process; tests/integration calls them through Serve's proxy."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import grpc
import pytest

from deployments.api import grpc as tandem_grpc
from deployments.api.completions import CompletionRequest
from deployments.api.tandem_pb2 import GenerateRequest, TokenIds
from tests.deployments.serving import MAX_REQUEST_BYTES, LocalServing, local_serving
from tests.tiny_models import save_model
from workers.errors import TandemError
from workers.model import load_model

generate = partial(tandem_grpc.generate, max_request_bytes=MAX_REQUEST_BYTES)
generate_stream = partial(tandem_grpc.generate_stream, max_request_bytes=MAX_REQUEST_BYTES)


class Context:
    def __init__(self) -> None:
        self.code: grpc.StatusCode | None = None
        self.details = ""

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details


@pytest.fixture
async def serving(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalServing]:
    name = save_model(tmp_path_factory.mktemp("model"))
    async with local_serving(load_model(name, dtype="float32", device="cpu")) as serving:
        yield serving


async def test_unary_and_stream_are_the_same_text(serving: LocalServing) -> None:
    request = GenerateRequest(text="Hello", max_tokens=12, seed=3, ignore_eos=True)
    context = Context()
    whole = await generate(serving.service, request, context)
    assert context.code is None
    assert (len(whole.text), len(whole.token_ids)) == (12, 12)
    assert (whole.model, whole.finish_reason) == ("tiny", "length")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 12)
    chunks = [chunk async for chunk in generate_stream(serving.service, request, context)]
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
    response = await generate(serving.service, request, Context())
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
    response = await generate(serving.service, GenerateRequest(text="Hi"), Context())
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
        context = Context()
        if streamed:
            stream = generate_stream(serving.service, request_, context)
            with pytest.raises(TandemError):
                await anext(stream)
        else:
            await generate(serving.service, request_, context)
        assert context.code is code
        assert words in context.details


async def test_no_traceback_reaches_a_client(
    serving: LocalServing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(serving.service, "open", fail)
    context = Context()
    await generate(serving.service, GenerateRequest(text="a"), context)
    assert context.code is grpc.StatusCode.INTERNAL
    assert context.details == "internal error; the server's log says more"


async def test_closing_a_stream_frees_everything(serving: LocalServing) -> None:
    request = GenerateRequest(text="Hello", max_tokens=200, seed=3, ignore_eos=True)
    stream = generate_stream(serving.service, request, Context())
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    async with asyncio.timeout(5):
        while serving.loop.num_live or serving.targets.num_used_blocks:
            await asyncio.sleep(0.01)
