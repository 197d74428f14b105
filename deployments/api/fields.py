"""The fields that all requests have, in whatever wire format: one definition of each.

A field's name, type, default, limits, meaning and number in `tandem.proto` stand in
GenerationFields and nowhere else. OpenAI's requests inherit them, the gRPC request is written from
them (`make proto`), and the tables of the docs are made of them (`rows`). A field of the sampler is
named as in SamplingParams, and so finds its way there.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from annotated_types import MaxLen
from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints
from pydantic.fields import FieldInfo

from deployments.api.validation import RequestModel, brief, kinds_of, number_words
from deployments.router.request import GenerationRequest, Prompt
from workers.types import SamplingParams

LOWEST_TEMPERATURE = 1e-5
"""Sampling at less is greedy, as in vLLM: logits divided by less would overflow."""
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
"""Characters: whatever may yet become a stop string is compared with it at every token."""
MAX_LOGIT_BIASES = 4096
MAX_SALT_LENGTH = 256
SEED_RANGE = 2**63
MAX_INTEGER = 2**31 - 1
"""The greatest number of gRPC's int32, which HTTP keeps to as well."""
REQUIRED = "required"
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


MarkT = TypeVar("MarkT")


@dataclass(frozen=True, slots=True)
class Grpc:
    """A field's number in GenerateRequest of `tandem.proto`; it may never change."""

    number: int


@dataclass(frozen=True, slots=True)
class Takes:
    """A field's values in words, where its type and limits do not say it all."""

    words: str


def _greedy_if_tiny(temperature: float) -> float:
    return 0.0 if temperature < LOWEST_TEMPERATURE else temperature


def _listed(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_STOP_STRINGS:
        raise ValueError(f"it must have at most {MAX_STOP_STRINGS} items")
    return [value] if isinstance(value, str) else value


def _with_integer_keys(value: Any) -> Any:
    """JSON has string keys only."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LOGIT_BIASES:
        raise ValueError(f"it must have at most {MAX_LOGIT_BIASES} entries")
    return {_token_id(key): bias for key, bias in value.items()}


def _token_id(key: Any) -> int:
    """From a key of logit_bias, which HTTP has as a string and gRPC as a number."""
    if isinstance(key, str) and _TOKEN_ID.fullmatch(key):
        return int(key)
    if isinstance(key, int):
        return key
    raise ValueError(f"its key {brief(key)} is no token id, as 15 or 1024 would be")


Number = Annotated[float, Field(allow_inf_nan=False)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_LENGTH)]
Bias = Annotated[Number, Field(ge=-100, le=100)]


class GenerationFields(RequestModel):
    """The fields that say how a completion is generated; requests of all wire formats have them."""

    max_tokens: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_INTEGER,
            description="Tokens of each completion at most. Prompt and completion together have at "
            "most max_model_len.",
        ),
        Grpc(4),
    ] = 16
    temperature: Annotated[
        Number,
        Field(
            ge=0,
            le=2,
            description=f"Divides the logits. Below {LOWEST_TEMPERATURE:.5f} it is 0: the most "
            "likely token is taken, as in vLLM.",
        ),
        AfterValidator(_greedy_if_tiny),
        Grpc(5),
    ] = 1.0
    top_p: Annotated[
        Number,
        Field(
            gt=0,
            le=1,
            description="Only the likeliest tokens are sampled whose probabilities sum to this.",
        ),
        Grpc(6),
    ] = 1.0
    top_k: Annotated[
        int,
        Field(
            ge=-1,
            le=MAX_INTEGER,
            description="Only so many of the likeliest tokens are sampled; 0 and -1 mean all.",
        ),
        AfterValidator(lambda top_k: max(0, top_k)),
        Grpc(7),
    ] = 0
    min_p: Annotated[
        Number,
        Field(
            ge=0,
            le=1,
            description="Only tokens are sampled that have this share of the likeliest one's "
            "probability.",
        ),
        Grpc(8),
    ] = 0.0
    repetition_penalty: Annotated[
        Number,
        Field(
            ge=0.1,
            le=10,
            description="Divides positive and multiplies negative logits of tokens that stand in "
            "the prompt or the completion.",
        ),
        Grpc(9),
    ] = 1.0
    presence_penalty: Annotated[
        Number,
        Field(
            ge=-2,
            le=2,
            description="Subtracted once from the logit of a token that stands in the completion.",
        ),
        Grpc(10),
    ] = 0.0
    frequency_penalty: Annotated[
        Number,
        Field(
            ge=-2,
            le=2,
            description="Subtracted from a token's logit as often as it stands in the completion.",
        ),
        Grpc(11),
    ] = 0.0
    logit_bias: Annotated[
        dict[int, Bias],
        Field(description="Added to the logits of these tokens.", default_factory=dict),
        BeforeValidator(_with_integer_keys),
        Takes(f"at most {MAX_LOGIT_BIASES} token ids, as decimal digits, with -100 to 100 each"),
        Grpc(12),
    ]
    seed: Annotated[
        int | None,
        Field(
            ge=-SEED_RANGE,
            le=SEED_RANGE - 1,
            description="The same seed gives the same completion (docs/exactness.md says with "
            "which options). A random one is drawn when it is absent.",
        ),
        Takes("a signed integer of 64 bits"),
        Grpc(13),
    ] = None
    stop: Annotated[
        list[StopString],
        Field(
            max_length=MAX_STOP_STRINGS,
            description="A completion ends before the first of these strings.",
            default_factory=list,
        ),
        BeforeValidator(_listed, json_schema_input_type=str | list[StopString]),
        Takes(
            f"a string, or a list of at most {MAX_STOP_STRINGS}, each of 1 to {MAX_STOP_LENGTH} "
            "characters"
        ),
        Grpc(14),
    ]
    ignore_eos: Annotated[
        bool,
        Field(description="If true, a completion goes on after a token that ends the text."),
        Grpc(15),
    ] = False
    cache_salt: Annotated[
        str,
        Field(
            max_length=MAX_SALT_LENGTH,
            description="Prompts share cached prefixes with those of the same salt only.",
        ),
        Grpc(16),
    ] = ""

    def to_request(
        self,
        *,
        model: str,
        prompts: Sequence[Prompt],
        n: int = 1,
        timeout_s: float | None = None,
    ) -> GenerationRequest:
        """The neutral request, with what each wire format says in its own way."""
        return GenerationRequest(
            model=model,
            prompts=tuple(prompts),
            n=n,
            timeout_s=timeout_s,
            max_tokens=self.max_tokens,
            sampling=self._sampling(),
            seed=self.seed,
            stop=tuple(self.stop),
            ignore_eos=self.ignore_eos,
            cache_salt=self.cache_salt,
        )

    def _sampling(self) -> SamplingParams:
        names = [field.name for field in dataclasses.fields(SamplingParams)]
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        return SamplingParams(**{**values, "logit_bias": tuple(sorted(self.logit_bias.items()))})


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRow:
    """One field of a request, for a table of the docs."""

    name: str
    takes: str
    """Its values, in words."""
    default: str
    """The default in JSON; REQUIRED where there is none, empty where the field is then absent."""
    meaning: str
    is_in_grpc: bool


def rows(model: type[RequestModel]) -> list[FieldRow]:
    """All fields that a request may have, required ones first; nested ones by their path."""
    found = list(_rows(model))
    return sorted(found, key=lambda row: row.default != REQUIRED)


def _rows(model: type[RequestModel], prefix: str = "") -> Iterator[FieldRow]:
    for name, field in model.model_fields.items():
        nested = next((kind for kind in kinds_of(field) if _is_request_model(kind)), None)
        if nested is not None:
            yield from _rows(nested, f"{name}.")
            continue
        yield FieldRow(
            name=prefix + name,
            takes=_takes(field),
            default=_default(field),
            meaning=field.description or "",
            is_in_grpc=mark(field, Grpc) is not None,
        )


def mark(field: FieldInfo, kind: type[MarkT]) -> MarkT | None:
    """The field's mark of a kind; None if it has none."""
    return next((found for found in field.metadata if isinstance(found, kind)), None)


def _takes(field: FieldInfo) -> str:
    kinds = kinds_of(field)
    if (words := mark(field, Takes)) is not None:
        return words.words
    if bool in kinds:
        return "true or false"
    if str in kinds:
        limit = mark(field, MaxLen)
        return "a string" + (f" of at most {limit.max_length} characters" if limit else "")
    return number_words(field)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return REQUIRED
    default = field.get_default(call_default_factory=True)
    return "" if default is None else json.dumps(default)


def _is_request_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, RequestModel)
