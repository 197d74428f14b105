"""One definition of each field: HTTP, gRPC, the sampler and the docs agree with it."""

import dataclasses
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from pydantic import Field
from pydantic.fields import FieldInfo

from deployments.api import proto
from deployments.api.completions import CompletionRequest
from deployments.api.field_table import REQUIRED, rows
from deployments.api.fields import GenerationFields
from deployments.api.grammar_fields import FormatFields
from deployments.api.grpc_fields import given_fields, marked_fields
from deployments.api.marks import Grpc, mark
from deployments.api.tandem_pb2 import GenerateRequest
from deployments.api.validation import RequestModel, kinds_of
from tests.deployments.loops import Models
from tests.deployments.serving import GrpcContext, local_serving
from workers.sampling_params import SamplingParams

NEUTRAL_NAMES = {
    "include_stop_str_in_output": ("include_stop",),
    "logprobs": ("num_logprobs",),
    "prompt_logprobs": ("num_prompt_logprobs",),
    "speculation": ("drafter", "max_gamma"),
}
"""Fields that have other names in a GenerationRequest."""
SAMPLING = [f.name for f in dataclasses.fields(SamplingParams) if f.name != "grammar"]
"""A grammar comes of several fields: see test_structured_output.py."""


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
    marked = marked_fields(CompletionRequest)
    assert set(marked) >= {*GenerationFields.model_fields, "n"}
    for name, field in marked.items():
        found = mark(field, Grpc)
        assert found is not None
        assert numbers[name] == found.number


def test_every_parameter_of_the_sampler_is_a_field_with_its_default() -> None:
    assert set(SAMPLING) <= set(GenerationFields.model_fields)
    assert GenerationFields().to_request(model="m", prompts=["p"]).sampling == SamplingParams()


async def test_every_field_means_the_same_over_http_and_grpc(models: Models) -> None:
    values = {
        name: unusual(field)
        for name, field in marked_fields(CompletionRequest).items()
        if name not in FormatFields.model_fields
    }
    by_http = CompletionRequest(model="tiny", prompt="Hello", **values).generation_request()
    sent = GenerateRequest(text="Hello", **values)
    async with local_serving(models.target) as serving:
        by_grpc = serving.rpcs._parse(sent, GrpcContext())
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


@pytest.mark.parametrize(
    ("sent", "sampled"),
    [({"top_k": -1}, {"top_k": 0}), ({"temperature": 9e-6}, {"temperature": 0.0})],
)
def test_values_that_mean_the_same_to_the_sampler_are_one(
    sent: dict[str, Any], sampled: dict[str, Any]
) -> None:
    request = GenerationFields(**sent).to_request(model="m", prompts=["p"])
    assert request.sampling == SamplingParams(**sampled)


class Inner(RequestModel):
    word: Annotated[Literal["a", "b"], Field(description="One of two."), Grpc(1)] = "a"
    hidden: bool = False


class Outer(RequestModel):
    """Every type that a field may have."""

    count: Annotated[int | None, Field(le=2**31 - 1), Grpc(1)] = None
    big: Annotated[int, Field(le=2**63 - 1), Grpc(2)] = 0
    ids: Annotated[list[int], Grpc(3)] = Field(default_factory=list)
    schema_text: Annotated[str | dict[str, Any] | None, Grpc(4)] = None
    inner: Annotated[Inner | None, Grpc(5)] = None
    inners: Annotated[list[Annotated[Inner, Field(title="x")]], Grpc(6)] = Field(
        default_factory=list
    )
    weights: Annotated[dict[int, Annotated[float, Field(ge=0)]], Grpc(7)] = Field(
        default_factory=dict
    )
    not_in_grpc: int = 0


def test_every_type_of_field_can_be_written() -> None:
    """What stood there before is replaced; what is below in the same message's way stays."""
    line = proto.BEGIN.format("Outer")
    before = f"message A {{\n  string text = 9;\n{line}  old = 1;\n}}\n\nmessage B {{}}\n"
    written = proto.with_fields(before, [Outer])
    assert written == proto.with_fields(written, [Outer])
    assert written == (
        f"message A {{\n  string text = 9;\n{line}"
        "  optional int32 count = 1;\n"
        "  optional int64 big = 2;\n"
        "  repeated int32 ids = 3;\n"
        "  optional string schema_text = 4;\n"
        "  optional Inner inner = 5;\n"
        "  repeated Inner inners = 6;\n"
        "  map<int32, double> weights = 7;\n"
        f"}}\n\nmessage B {{}}\n\n{proto.NESTED}\n"
        "message Inner {\n  // One of two.\n  optional string word = 1;\n}\n"
    )


def test_only_what_a_client_has_set_is_read() -> None:
    request = GenerateRequest(temperature=0, stop=["a"], logit_bias={7: 1.5}, text="t", model="m")
    assert given_fields(request, CompletionRequest) == {
        "temperature": 0,
        "stop": ["a"],
        "logit_bias": {7: 1.5},
    }
