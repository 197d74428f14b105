"""The OpenAI completion wire format, as far as it is served, with limits stated.

Unknown fields are refused by name: a misspelt `temprature` must not silently sample at 1.0.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
)
from pydantic import model_validator as validates_model

from deployments.api.unserved import OF_COMPLETIONS, OF_STREAM_OPTIONS, OffValues
from deployments.api.validation import RequestModel, check_text, field_error
from deployments.router.prompts import Prompt

MAX_CHOICES = 128
"""Prompts of a request times n."""
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
"""Characters: whatever may yet become a stop string is compared with it at every token."""
MAX_LOGIT_BIASES = 4096
MAX_SALT_LENGTH = 256
SEED_RANGE = 2**63

Number = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, AfterValidator(check_text)]
SentPrompt = (
    str
    | Annotated[list[int], Field(min_length=1)]
    | Annotated[list[str | list[int]], Field(min_length=1, max_length=MAX_CHOICES)]
)
"""The forms that a client may give its prompts, for the schema."""
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


class StreamOptions(RequestModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Beyond OpenAI's: every event has the usage so far, if include_usage asks for any."""

    @classmethod
    def off_values(cls) -> OffValues:
        return OF_STREAM_OPTIONS


class CompletionRequest(RequestModel):
    """`POST /v1/completions`. Beyond OpenAI's: top_k, min_p, repetition_penalty, ignore_eos,
    cache_salt."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Text
    prompt: list[Prompt]
    """One string or list of token ids, or a list of either."""
    max_tokens: int = Field(default=16, ge=1)
    temperature: Number = Field(default=1.0, ge=0, le=2)
    top_p: Number = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    min_p: Number = Field(default=0.0, ge=0, le=1)
    repetition_penalty: Number = Field(default=1.0, ge=0.1, le=10)
    presence_penalty: Number = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: Number = Field(default=0.0, ge=-2, le=2)
    logit_bias: dict[int, Annotated[Number, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    seed: int | None = Field(default=None, ge=-SEED_RANGE, le=SEED_RANGE - 1)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    best_of: int | None = None
    """Only as many as n: the best of more than are returned are not chosen."""
    stop: list[Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_LENGTH)]] = Field(
        default_factory=list, max_length=MAX_STOP_STRINGS
    )
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    cache_salt: str = Field(default="", max_length=MAX_SALT_LENGTH)
    """Prompts share cached prefixes with those of the same salt only."""
    user: Text | None = None

    @classmethod
    def off_values(cls) -> OffValues:
        return OF_COMPLETIONS

    @field_validator("prompt", mode="before", json_schema_input_type=SentPrompt)
    @classmethod
    def _list_prompts(cls, value: Any) -> list[Prompt]:
        """A list of prompts, whichever of the four forms was sent."""
        if isinstance(value, str) or _is_token_ids(value):
            value = [value]
        if not isinstance(value, list) or not value:
            raise ValueError("it must be a string, a list of token ids, or a list of either")
        if len(value) > MAX_CHOICES:
            raise ValueError(f"it has {len(value)} prompts; at most {MAX_CHOICES} fit one request")
        for index, prompt in enumerate(value):
            if not isinstance(prompt, str) and not _is_token_ids(prompt):
                raise ValueError(
                    f"item {index} is {_brief(prompt)}; it must be a string or a list of token ids"
                )
        return [
            check_text(prompt) if isinstance(prompt, str) else tuple(prompt) for prompt in value
        ]

    @field_validator("stop", mode="before")
    @classmethod
    def _list_stop(cls, value: Any) -> Any:
        if isinstance(value, list) and len(value) > MAX_STOP_STRINGS:
            raise ValueError(f"it must have at most {MAX_STOP_STRINGS} items")
        return [value] if isinstance(value, str) else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _integer_keys(cls, value: Any) -> Any:
        """JSON has string keys only."""
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_LOGIT_BIASES:
            raise ValueError(f"it must have at most {MAX_LOGIT_BIASES} entries")
        return {_token_id(key): bias for key, bias in value.items()}

    @validates_model(mode="after")
    def _check_together(self) -> Self:
        if self.best_of not in (None, self.n):
            raise field_error(
                "best_of",
                f"best_of is {self.best_of} and n is {self.n}: to return some of several "
                "completions is not served yet; leave it out or make it equal to n",
            )
        if self.stream_options is not None and not self.stream:
            raise field_error(
                "stream_options",
                "stream_options are given, but stream is not true; only a stream has them",
            )
        return self


def _token_id(key: Any) -> int:
    """From a key of logit_bias, which HTTP has as a string and gRPC as a number."""
    if isinstance(key, str) and _TOKEN_ID.fullmatch(key):
        return int(key)
    if isinstance(key, int):
        return key
    raise ValueError(f"its key {_brief(key)} is no token id, as 15 or 1024 would be")


def _is_token_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    )


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class CompletionTokensDetails(BaseModel):
    accepted_prediction_tokens: int
    """Draft tokens that stand in the completion."""
    rejected_prediction_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None


class Completion(BaseModel):
    """The response, and each event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tandem"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    error: ErrorDetail
