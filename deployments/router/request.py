"""A client's request in no wire format: what `deployments/api` makes and the service runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from deployments.router.chat.message import FIELD, Conversation
from deployments.router.tenants.keys import ANYBODY, Tenant
from workers.errors import InvalidRequestError
from workers.sampling_params import SamplingParams
from workers.types import Rule

MAX_COMPLETIONS = 128
"""Completions of one request: its prompts times n."""

MAX_SHOWN = 2**18
"""Tokens of prompts, or log-probabilities if they have some, in one answer; and log-probabilities
of completions in one that is no stream."""

Prompt = str | tuple[int, ...]
"""A text, or its token ids."""


def prompt_fields(prompts: Sequence[Prompt | Conversation]) -> list[str]:
    """The field of a request, in every wire format, that holds each of its prompts."""
    if isinstance(prompts[0], Conversation):
        return [FIELD]
    return ["prompt"] if len(prompts) == 1 else [f"prompt.{i}" for i in range(len(prompts))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sends a request."""

    tenant: Tenant = ANYBODY
    request_id: str = ""
    """The id that the client or a proxy gave the request; empty if nobody did."""


SOMEBODY = Caller()
"""A caller of whom nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Everything that decides a request's completions and how long they may take.

    A wire format has checked what can be checked without the model; the service checks the rest.
    Who asks is a Caller's affair.
    """

    model: str | None
    """The name that the client gave, if any; the service refuses one that it does not serve."""
    prompts: tuple[Prompt | Conversation, ...]
    n: int = 1
    """Completions of each prompt that are wanted."""
    best_of: int | None = None
    """Completions of each prompt that are made, of which the `n` likeliest are returned; None means
    `n`."""
    max_tokens: int | None
    """Tokens of each completion at most; None for as many as the context has room for."""
    sampling: SamplingParams
    seed: int | None = None
    """The seed of each prompt's first completion; the next ones count up. None draws one."""
    bad_words: tuple[str, ...] = ()
    """Words that do not stand in a completion; the service adds their tokens to `sampling`."""
    stop: tuple[str, ...] = ()
    """A completion ends before the first of these strings."""
    include_stop: bool = False
    """If true, the text has the stop string, or the text of the token, that ended it."""
    ignore_eos: bool = False
    """If true, completions go on after a token that ends the text."""
    skip_special_tokens: bool = True
    """Whether special tokens have no text."""
    cache_salt: str = ""
    """Prompts share cached prefixes with those of the same salt only."""
    num_logprobs: int | None = None
    """Likeliest tokens to name beside each of a completion; None for no log-probabilities."""
    num_prompt_logprobs: int | None = None
    """Likeliest tokens to name beside each of the prompt; None for no log-probabilities."""
    echo: bool = False
    """Whether the prompt's text is wanted too."""
    return_token_ids: bool = False
    """Whether the ids of prompt and completion are wanted."""
    add_special_tokens: bool = True
    """Whether a text begins and ends with the special tokens that its tokenizer gives it."""
    parse_special_tokens: bool = True
    """Whether the name of a special token in a text means that token."""
    prediction: str = ""
    """What the client expects most of each completion to be."""
    drafter: str | None = None
    """The only drafter that may draft; None for all that the app has."""
    max_gamma: int | None = None
    """Draft tokens of a round at most; None for what the app has."""
    verification: Rule | None = None
    """The rule by which drafts are judged; None for the app's."""
    grammar_field: str | None = None
    """The field that asks for the grammar of `sampling`, in the client's spelling."""
    priority: int = 0
    """Among the completions of one key that wait, those of the lowest run first."""
    timeout_s: float | None = None
    """Seconds that the client waits for the whole request; None means as long as it takes."""

    @property
    def num_completions(self) -> int:
        """The number of completions that are made."""
        return len(self.prompts) * self.num_choices

    @property
    def num_choices(self) -> int:
        """Completions of each prompt that are made."""
        return self.n if self.best_of is None else self.best_of

    @property
    def shows_prompt(self) -> bool:
        """Whether anything of the prompt's tokens is wanted."""
        return self.echo or self.return_token_ids or self.num_prompt_logprobs is not None

    @property
    def shows_tokens(self) -> bool:
        """Whether tokens are wanted that have no text, or none yet."""
        return self.return_token_ids or self.num_logprobs is not None


def check_shown_prompts(request: GenerationRequest, prompts: Sequence[Sequence[int]]) -> None:
    """Raise if the prompts' tokens, with their log-probabilities and repeated for each choice, are
    more than an answer can hold beside those of other requests."""
    if not request.shows_prompt:
        return
    num_tokens, num_top = sum(map(len, prompts)), request.num_prompt_logprobs
    num_each = 1 if num_top is None else num_top + 1
    num_shown = request.num_choices * num_tokens * num_each
    if num_shown > MAX_SHOWN:
        with_logprobs = "" if num_top is None else f" with {num_each} log-probabilities each"
        raise InvalidRequestError(
            f"{request.num_choices} choices that show {num_tokens} prompt tokens{with_logprobs} "
            f"make {num_shown}; at most {MAX_SHOWN} fit one request: lower n or the "
            "number of likeliest tokens, or shorten the prompts",
            field=prompt_fields(request.prompts)[0],
        )


def check_shown_completions(num_tokens: int, num_logprobs: int | None) -> None:
    """Raise if an answer that is no stream holds more log-probabilities of so many tokens than it
    can beside those of other requests."""
    if num_logprobs is not None and num_tokens * (num_logprobs + 1) > MAX_SHOWN:
        raise InvalidRequestError(
            f"the answer has more than {MAX_SHOWN} log-probabilities, the most without a stream: "
            "set stream to true, or lower n, max_tokens or the number of likeliest tokens",
            field="logprobs",
        )
