"""The OpenAI completion wire format, as far as it is served, with limits stated.

Unknown fields are refused by name: a misspelt `temprature` must not silently sample at 1.0.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

MAX_CHOICES = 128
"""Prompts of a request times n."""
MAX_STOP_STRINGS = 16
SEED_RANGE = 2**63

Prompt = str | tuple[int, ...]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class CompletionRequest(BaseModel):
    """`POST /v1/completions`. Beyond OpenAI's: top_k, min_p, repetition_penalty, ignore_eos,
    cache_salt."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    prompt: list[Prompt]
    """One string or list of token ids, or a list of either."""
    max_tokens: int = Field(default=16, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0, le=10)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    seed: int | None = Field(default=None, ge=-SEED_RANGE, lt=SEED_RANGE)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stop: list[Annotated[str, StringConstraints(min_length=1)]] = Field(
        default_factory=list, max_length=MAX_STOP_STRINGS
    )
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    cache_salt: str = Field(default="", max_length=256)
    """Prompts share cached prefixes with those of the same salt only."""
    user: str | None = None

    # Fields of OpenAI's that are not served; clients send their defaults.
    best_of: Literal[1] | None = None
    echo: Literal[False] = False
    logprobs: Literal[None] = None
    suffix: Literal[None] = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _list_prompts(cls, value: Any) -> list[Prompt]:
        """A list of prompts, whichever of the four forms was sent."""
        if isinstance(value, str) or _is_token_ids(value):
            value = [value]
        if not isinstance(value, list) or not value:
            raise ValueError("it must be a string, a list of token ids, or a list of either")
        for index, prompt in enumerate(value):
            if not isinstance(prompt, str) and not _is_token_ids(prompt):
                raise ValueError(
                    f"item {index} is {_brief(prompt)}; it must be a string or a list of token ids"
                )
        return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in value]

    @field_validator("stop", mode="before")
    @classmethod
    def _list_stop(cls, value: Any) -> Any:
        if value is None:
            return []
        return [value] if isinstance(value, str) else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _integer_keys(cls, value: Any) -> Any:
        """JSON has string keys only."""
        if value is None:
            return {}
        if isinstance(value, dict):
            return {
                int(key) if isinstance(key, str) and key.isdecimal() else key: bias
                for key, bias in value.items()
            }
        return value

    @field_validator(
        "max_tokens", "temperature", "top_p", "n", "presence_penalty", "frequency_penalty",
        "stream", "echo", mode="before",
    )  # fmt: skip
    @classmethod
    def _null_is_default(cls, value: Any, info: Any) -> Any:
        """OpenAI allows null for these; it means the default."""
        return cls.model_fields[info.field_name].default if value is None else value


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
