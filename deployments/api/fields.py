"""The fields that all requests have, in whatever wire format: one definition of each.

A field's name, type, default, limits, meaning and number in `tandem.proto` stand in
GenerationFields, or in what it inherits, and nowhere else. OpenAI's requests inherit them, the gRPC
request is written from them (`make proto`), and the tables of the docs are made of them
(`field_table`).
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from deployments.api.grammar_fields import GrammarFields
from deployments.api.marks import Grpc, Takes
from deployments.api.prediction import Prediction
from deployments.api.sampling_fields import MAX_INTEGER, SamplingFields
from deployments.api.validation import RequestModel, field_error
from deployments.router.chat.message import Conversation
from deployments.router.request import GenerationRequest, Prompt
from workers.types import Rule

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
"""The most characters of a stop string: whatever may yet become one is compared at every token."""
MAX_SALT_LENGTH = 256
MAX_LOGPROBS = 20
MAX_SPECULATIVE_TOKENS = 64


def _listed(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_STOP_STRINGS:
        raise ValueError(f"it must have at most {MAX_STOP_STRINGS} items")
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_LENGTH)]


class Speculation(RequestModel):
    """How a request's completions are drafted, and how drafts are judged."""

    is_ours_alone = True

    mode: Annotated[
        Literal["auto", "off", "model", "prompt_lookup", "suffix", "early_exit", "predicted"],
        Field(
            description="`auto` lets all drafters of the app draft, `off` none, and a name that "
            "one only; `predicted` drafts from `prediction`."
        ),
        Takes("auto, off, model, prompt_lookup, suffix, early_exit or predicted"),
        Grpc(1),
    ] = "auto"
    num_speculative_tokens: Annotated[
        int | None,
        Field(
            ge=0,
            le=MAX_SPECULATIVE_TOKENS,
            description="Draft tokens of a round at most, where the app's own limit is not lower.",
        ),
        Grpc(2),
    ] = None
    verification: Annotated[
        Rule | None,
        Field(
            description="The rule by which drafts are judged; by default the app's. Under "
            "`coupled` the text is that of the seed. `rejection` and `block` accept more drafts "
            "where tokens are drawn, and the text is then any of its law. At temperature 0 all are "
            "the same."
        ),
        Takes("coupled, rejection or block"),
        Grpc(3),
    ] = None

    @property
    def drafter(self) -> str | None:
        return None if self.mode in ("auto", "off") else self.mode

    @property
    def max_gamma(self) -> int | None:
        return 0 if self.mode == "off" else self.num_speculative_tokens


class GenerationFields(SamplingFields, GrammarFields):
    """The fields that say how a completion is generated; requests of all wire formats have them."""

    max_tokens: Annotated[
        int,
        Field(
            ge=0,
            le=MAX_INTEGER,
            description="Tokens of each completion at most. Prompt and completion together have at "
            "most max_model_len. 0 asks for the prompt alone, with `echo` or `prompt_logprobs`.",
        ),
        Grpc(4),
    ] = 16
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
    include_stop_str_in_output: Annotated[
        bool,
        Field(
            description="If true, the text has the stop string, or the token of `stop_token_ids`, "
            "that ended it."
        ),
        Grpc(20),
    ] = False
    ignore_eos: Annotated[
        bool,
        Field(description="If true, a completion goes on after a token that ends the text."),
        Grpc(15),
    ] = False
    cache_salt: Annotated[
        str,
        Field(
            max_length=MAX_SALT_LENGTH,
            description="Prompts share cached prefixes, and completions the texts that `suffix` "
            "drafts from, with those of the same salt only.",
        ),
        Grpc(16),
    ] = ""
    skip_special_tokens: Annotated[
        bool, Field(description="If false, the text has the names of special tokens too."), Grpc(21)
    ] = True
    logprobs: Annotated[
        int | None,
        Field(
            ge=0,
            le=MAX_LOGPROBS,
            description="Each token has its log-probability, and those of so many of the likeliest "
            "in its place, by the target's own law: before temperature, penalties and whatever "
            "else shapes the choice, as vLLM has it by default.",
        ),
        Grpc(22),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Field(
            ge=0,
            le=MAX_LOGPROBS,
            description="The same for each token of the prompt but the first.",
        ),
        Grpc(23),
    ] = None
    return_token_ids: Annotated[
        bool,
        Field(description="If true, the answer has the token ids of prompt and completion."),
        Grpc(24),
    ] = False
    speculation: Annotated[
        Speculation | None,
        Field(description="How the completions are drafted."),
        Grpc(25),
    ] = None
    prediction: Annotated[
        Prediction | None,
        Field(description="What most of each completion is expected to be."),
        Grpc(26),
    ] = None

    @model_validator(mode="after")
    def _check_max_tokens(self) -> Self:
        if self.max_tokens == 0 and not self.shows_prompt:
            raise field_error(
                "max_tokens",
                "max_tokens is 0: it must be an integer from 1 on, unless echo or prompt_logprobs "
                "ask for the prompt",
            )
        return self

    @model_validator(mode="after")
    def _check_prediction(self) -> Self:
        mode = self.speculation.mode if self.speculation is not None else None
        if mode == "predicted" and self.prediction is None:
            raise field_error(
                "speculation.mode",
                "speculation.mode is 'predicted': it needs a prediction; give one, or use 'auto'",
            )
        return self

    @property
    def shows_prompt(self) -> bool:
        """Whether a request asks for its prompt."""
        return self.prompt_logprobs is not None

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to name beside each token; None for no log-probabilities."""
        return self.logprobs

    priority: Annotated[
        int,
        Field(
            ge=-MAX_INTEGER - 1,
            le=MAX_INTEGER,
            description="Among the requests of one API key that wait, the lowest runs first.",
        ),
        Grpc(60),
    ] = 0

    def to_request(
        self,
        *,
        model: str | None,
        prompts: Sequence[Prompt | Conversation],
        n: int = 1,
        timeout_s: float | None = None,
    ) -> GenerationRequest:
        """The neutral request, with what each wire format says in its own way."""
        speculation = self.speculation or Speculation()
        return GenerationRequest(
            model=model,
            prompts=tuple(prompts),
            n=n,
            timeout_s=timeout_s,
            max_tokens=self.max_tokens,
            sampling=self.sampling_params(),
            seed=self.seed,
            bad_words=tuple(self.bad_words),
            stop=tuple(self.stop),
            include_stop=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            cache_salt=self.cache_salt,
            grammar_field=self.grammar_field,
            num_logprobs=self.num_logprobs,
            num_prompt_logprobs=self.prompt_logprobs,
            return_token_ids=self.return_token_ids,
            prediction=self.prediction.content if self.prediction is not None else "",
            drafter=speculation.drafter,
            max_gamma=speculation.max_gamma,
            verification=speculation.verification,
            priority=self.priority,
        )
