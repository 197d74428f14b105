"""The wire format that OpenAI's endpoints share: the model, n, streams, usage."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, model_validator

from deployments.api import unserved
from deployments.api.fields import GenerationFields
from deployments.api.grammar_fields import FormatFields
from deployments.api.marks import Grpc
from deployments.api.validation import RequestModel, check_text, field_error
from deployments.router import generation
from deployments.router.request import MAX_COMPLETIONS
from deployments.router.speculation_counts import SpeculationCounts

Text = Annotated[str, AfterValidator(check_text)]


class StreamOptions(RequestModel):
    include_usage: Annotated[
        bool, Field(description="If true, a last event has the usage of the whole request.")
    ] = False
    continuous_usage_stats: Annotated[
        bool,
        Field(
            description="If true and include_usage too, every event has the usage so far, as in "
            "vLLM."
        ),
    ] = False

    @classmethod
    def unserved_fields(cls) -> unserved.UnservedFields:
        return unserved.STREAM_OPTIONS


class OpenAIRequest(FormatFields, GenerationFields):
    """The fields that OpenAI's requests have beside those of all wire formats."""

    model: Annotated[
        Text | None, Field(description="The served model's name, or one of several.")
    ] = None
    n: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_COMPLETIONS,
            description="Completions of each prompt. Completion i has the seed `seed` + i, which "
            f"wraps around at 2^63. Prompts times n are at most {MAX_COMPLETIONS}.",
        ),
        Grpc(30),
    ] = 1
    stream: Annotated[
        bool, Field(description="If true, the answer is a stream of server-sent events.")
    ] = False
    stream_options: StreamOptions | None = None
    user: Annotated[Text | None, Field(description="Changes nothing.")] = None

    @property
    def used_stream_options(self) -> StreamOptions | None:
        """The options of the stream that was asked for; None if the answer is to be whole."""
        return (self.stream_options or StreamOptions()) if self.stream else None

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise field_error(
                "stream_options",
                "stream_options are given, but stream is not true; only a stream has them",
            )
        return self


class CompletionTokensDetails(BaseModel):
    accepted_prediction_tokens: int
    """Draft tokens that stand in the completion."""
    rejected_prediction_tokens: int
    reasoning_tokens: Annotated[int | None, Field(exclude_if=lambda value: value is None)] = None
    """Tokens of thoughts, their tags included; absent where thoughts are not looked for."""


class SpeculationUsage(BaseModel):
    """Counts over the rounds of a request in which drafts were tested."""

    rounds: int
    drafted_tokens: int
    """Draft tokens that were verified."""
    tested_tokens: int
    """Draft tokens that were compared with the target's own: in each round the accepted ones and
    the first that was not."""
    accepted_tokens: int
    accepted_by_position: list[int]
    """How often the first, the second and so on of a round's drafts was accepted."""
    tokens_per_verify: float | None
    """Mean tokens that such a round added to a completion; null where there was none."""

    @classmethod
    def of(cls, counts: SpeculationCounts) -> Self:
        return cls(
            rounds=counts.num_rounds,
            drafted_tokens=counts.num_draft_tokens,
            tested_tokens=counts.num_tested,
            accepted_tokens=counts.num_accepted,
            accepted_by_position=counts.accepted_by_position,
            tokens_per_verify=counts.tokens_per_verify,
        )


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails
    speculation: SpeculationUsage

    @classmethod
    def of(cls, usage: generation.Usage) -> Self:
        return cls(
            prompt_tokens=usage.num_prompt_tokens,
            completion_tokens=usage.num_completion_tokens,
            total_tokens=usage.num_prompt_tokens + usage.num_completion_tokens,
            completion_tokens_details=CompletionTokensDetails(
                accepted_prediction_tokens=usage.num_accepted,
                rejected_prediction_tokens=usage.num_rejected,
            ),
            speculation=SpeculationUsage.of(usage.speculation),
        )


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tandem"
    max_model_len: int
    weight_bytes: int
    """Bytes of the weights that each rank of the target holds."""
    quantization: str
    """How they were quantized as they were loaded, or `none`."""
    draft_weight_bytes: int | None
    """Bytes of the draft model's weights; null without one."""
    draft_quantization: str | None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
