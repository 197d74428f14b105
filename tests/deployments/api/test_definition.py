"""One definition of each field: HTTP, gRPC, the sampler and the docs agree with it."""

import dataclasses
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

from deployments.api import grpc as tandem_grpc
from deployments.api import proto
from deployments.api.completions import CompletionRequest
from deployments.api.field_table import REQUIRED, rows
from deployments.api.fields import GenerationFields
from deployments.api.marks import Grpc, mark
from deployments.api.tandem_pb2 import GenerateRequest
from deployments.api.validation import RequestModel, kinds_of
from tests.deployments.loops import Models
from tests.deployments.serving import MAX_REQUEST_BYTES, local_serving
from workers.types import SamplingParams

NEUTRAL_NAMES = {
    "include_stop_str_in_output": ("include_stop",),
    "logprobs": ("num_logprobs",),
    "prompt_logprobs": ("num_prompt_logprobs",),
    "speculation": ("drafter", "max_gamma"),
}
"""Fields that have other names in a GenerationRequest."""
SAMPLING = [field.name for field in dataclasses.fields(SamplingParams)]


def unusual(field: FieldInfo) -> Any:
    """A value that the field takes and that is not its default."""
    for kind in kinds_of(field):
        if get_origin(kind) is Literal:
            return get_args(kind)[-1]
        if isinstance(kind, type) and issubclass(kind, RequestModel):
            return {name: unusual(inner) for name, inner in kind.model_fields.items()}
    if field.annotation == list[int]:
        return [4]
    for kind, value in ((bool, not field.default), (int, 3), (str, "x")):
        if kind in kinds_of(field):
            return value
    if field.annotation is float:
        names = ("ge", "gt", "le")
        marks = field.metadata
        low, high = (getattr(m, name) for m in marks for name in names if hasattr(m, name))
        return low + (high - low) / 8
    return {7: 1.5} if get_origin(field.annotation) is dict else ["x"]


def test_the_proto_says_what_the_definition_says() -> None:
    """`make proto` was run after the last change of fields.py."""
    text = proto.PATH.read_text()
    assert proto.with_fields(text) == text
    numbers = {field.name: field.number for field in GenerateRequest.DESCRIPTOR.fields}
    for name, field in GenerationFields.model_fields.items():
        marked = mark(field, Grpc)
        assert marked is not None
        assert numbers[name] == marked.number


def test_every_parameter_of_the_sampler_is_a_field_with_its_default() -> None:
    assert set(SAMPLING) <= set(GenerationFields.model_fields)
    assert GenerationFields().to_request(model="m", prompts=["p"]).sampling == SamplingParams()


async def test_every_field_means_the_same_over_http_and_grpc(models: Models) -> None:
    values = {name: unusual(field) for name, field in GenerationFields.model_fields.items()}
    by_http = CompletionRequest(model="tiny", prompt="Hello", **values).generation_request()
    sent = GenerateRequest(text="Hello", **values)
    async with local_serving(models.target) as serving:
        by_grpc = tandem_grpc._parse(serving.service, sent, MAX_REQUEST_BYTES)
    assert by_grpc == by_http
    plain = CompletionRequest(model="tiny", prompt="Hello").generation_request()
    for name in values.keys() - set(SAMPLING) | {"bad_words"}:
        for neutral in NEUTRAL_NAMES.get(name, (name,)):
            assert getattr(by_http, neutral) != getattr(plain, neutral), name
    for name in {*SAMPLING} - {"bad_words"}:
        assert getattr(by_http.sampling, name) != getattr(plain.sampling, name), name


def test_the_table_has_every_field_in_words() -> None:
    table = {row.name: row for row in rows(CompletionRequest)}
    assert next(iter(table)) == "prompt"
    assert [name for name, row in table.items() if row.default == REQUIRED] == ["prompt"]
    assert {name.partition(".")[0] for name in table} == set(CompletionRequest.model_fields)
    assert all(row.meaning and row.takes for row in table.values())
    top_p = table["top_p"]
    assert (top_p.takes, top_p.default) == ("a number above 0 and at most 1", "1.0")
    assert table["cache_salt"].takes == "a string of at most 256 characters"
    assert (table["stream"].takes, table["stream"].default) == ("true or false", "false")
    assert table["seed"].default == ""
    assert table["user"].takes == "a string"
    assert table["stream_options.include_usage"].takes == "true or false"
    assert table["min_p"].is_in_grpc
    assert not table["n"].is_in_grpc


@pytest.mark.parametrize(
    ("sent", "sampled"),
    [({"top_k": -1}, {"top_k": 0}), ({"temperature": 9e-6}, {"temperature": 0.0})],
)
def test_values_that_mean_the_same_to_the_sampler_are_one(
    sent: dict[str, Any], sampled: dict[str, Any]
) -> None:
    request = GenerationFields(**sent).to_request(model="m", prompts=["p"])
    assert request.sampling == SamplingParams(**sampled)
