"""The fields that shape which tokens are chosen: one definition of each.

A field is named as in SamplingParams, and so finds its way there.
"""

import dataclasses
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

from deployments.api.marks import Grpc, Takes
from deployments.api.validation import RequestModel, brief
from workers.sampling_params import SamplingParams

LOWEST_TEMPERATURE = 1e-5
"""Sampling at less is greedy, as in vLLM: logits divided by less would overflow."""
MAX_LOGIT_BIASES = 4096
MAX_STOP_TOKENS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 256
"""The most characters of a bad word."""
SEED_RANGE = 2**63
MAX_INTEGER = 2**31 - 1
"""The greatest number of gRPC's int32, which HTTP keeps to as well."""
BY_ROUTER = frozenset({"logit_bias", "stop_token_ids", "bad_words"})
"""Fields that stand in SamplingParams in another form."""
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


def _greedy_if_tiny(temperature: float) -> float:
    return 0.0 if temperature < LOWEST_TEMPERATURE else temperature


def _with_integer_keys(value: Any) -> Any:
    """The biases by token ids as numbers: JSON has strings for keys."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LOGIT_BIASES:
        raise ValueError(f"it must have at most {MAX_LOGIT_BIASES} entries")
    return {_token_id(key): bias for key, bias in value.items()}


def _token_id(key: Any) -> int:
    """The token id of a key of logit_bias, which HTTP has as a string and gRPC as a number."""
    if isinstance(key, str) and _TOKEN_ID.fullmatch(key):
        return int(key)
    if isinstance(key, int):
        return key
    raise ValueError(f"its key {brief(key)} is no token id, as 15 or 1024 would be")


Number = Annotated[float, Field(allow_inf_nan=False)]
Bias = Annotated[Number, Field(ge=-100, le=100)]
BadWord = Annotated[str, StringConstraints(min_length=1, max_length=MAX_BAD_WORD_LENGTH)]


class SamplingFields(RequestModel):
    """The fields of the sampler; requests of all wire formats have them."""

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
    min_tokens: Annotated[
        int,
        Field(
            ge=0,
            le=MAX_INTEGER,
            description="No token that ends the text is chosen before a completion has so many "
            "tokens, and no stop string is looked for in these.",
        ),
        Grpc(17),
    ] = 0
    stop_token_ids: Annotated[
        list[int],
        Field(
            max_length=MAX_STOP_TOKENS,
            description="A completion ends with the first of these tokens, whose text is left out.",
            default_factory=list,
        ),
        Takes(f"a list of at most {MAX_STOP_TOKENS} token ids"),
        Grpc(18),
    ]
    bad_words: Annotated[
        list[BadWord],
        Field(
            max_length=MAX_BAD_WORDS,
            description="Words that do not stand in a completion. A word's last token is not "
            "chosen where the ones before it have just been written, with or without a space "
            "before the word, as in vLLM; the same characters in other tokens are not seen.",
            default_factory=list,
        ),
        Takes(
            f"a list of at most {MAX_BAD_WORDS} strings, each of 1 to {MAX_BAD_WORD_LENGTH} "
            "characters"
        ),
        Grpc(19),
    ]

    def sampling_params(self) -> SamplingParams:
        """What of the fields the sampler knows; `bad_words` are the tokenizer's to read."""
        names = {field.name for field in dataclasses.fields(SamplingParams)} - BY_ROUTER
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        return SamplingParams(
            **values,
            logit_bias=tuple(sorted(self.logit_bias.items())),
            stop_token_ids=tuple(dict.fromkeys(self.stop_token_ids)),
        )
