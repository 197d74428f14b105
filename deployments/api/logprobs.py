"""Log-probabilities in OpenAI's completions and in vLLM's words."""

from collections.abc import Callable, Sequence
from typing import Annotated, Self

from pydantic import BaseModel, SkipValidation
from typing_extensions import TypedDict

from deployments.router.sequence import TokenRecord

LOWEST_LOGPROB = -9999.0
"""Stands for the logarithm of 0, which JSON does not have, as in vLLM."""

Name = Callable[[int], str]
"""The text that stands for a token."""


class CompletionLogprobs(BaseModel):
    """The log-probabilities of a completion's tokens, in four lists of one length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Where each token's text begins in the choice's."""

    def __add__(self, other: Self) -> Self:
        """The log-probabilities of this part's tokens, then those of the other's."""
        return type(self)(
            tokens=self.tokens + other.tokens,
            token_logprobs=self.token_logprobs + other.token_logprobs,
            top_logprobs=self.top_logprobs + other.top_logprobs,
            text_offset=self.text_offset + other.text_offset,
        )


class PromptLogprob(TypedDict):
    """One of the tokens that might stand in a place of the prompt; there may be a million of these,
    which take five times as long to make as models."""

    logprob: float
    rank: int | None
    """The token's rank, 1 for the likeliest; null for a token of the prompt that is none of those
    asked for."""
    decoded_token: str


class TopLogprob(BaseModel):
    """A token that might stand in a place of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int]

    @classmethod
    def of(cls, name: str, logprob: float) -> Self:
        return cls(token=name, logprob=max(logprob, LOWEST_LOGPROB), bytes=list(name.encode()))


class TokenLogprob(TopLogprob):
    """A token of a chat's answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """The log-probabilities of all tokens of a chat's answer, those of thoughts and calls too."""

    content: list[TokenLogprob]
    refusal: None = None


PromptLogprobs = Annotated[list[dict[int, PromptLogprob] | None], SkipValidation]


def completion_logprobs(
    records: Sequence[TokenRecord], name: Name, *, num_top: int, first_offset: int
) -> CompletionLogprobs:
    """The log-probabilities of a text's tokens in the order of the records, whose text begins at
    `first_offset`, and of the `num_top` likeliest in each place.

    A prompt's first token, which nothing stands before, has null.
    """
    return CompletionLogprobs(
        tokens=[name(record.token_id) for record in records],
        token_logprobs=[_finite(record.logprob) for record in records],
        top_logprobs=[_by_name(record, name, num_top) for record in records],
        text_offset=[first_offset + record.text_offset for record in records],
    )


def chat_logprobs(records: Sequence[TokenRecord], name: Name, *, num_top: int) -> ChatLogprobs:
    """The log-probabilities of the records, in their order, and of the `num_top` likeliest tokens
    in each place."""
    return ChatLogprobs(
        content=[
            TokenLogprob(
                **dict(TopLogprob.of(name(record.token_id), record.logprob)),
                top_logprobs=[
                    TopLogprob.of(name(token_id), logprob)
                    for token_id, logprob in (record.top_logprobs or ())[:num_top]
                ],
            )
            for record in records
            if record.logprob is not None
        ]
    )


def prompt_logprobs(prompt: Sequence[TokenRecord], name: Name, *, num_top: int) -> PromptLogprobs:
    """The likeliest tokens at each place of a prompt, and its own, by token id."""
    return [_by_id(record, name, num_top) for record in prompt]


def _by_name(record: TokenRecord, name: Name, num_top: int) -> dict[str, float] | None:
    """The likeliest tokens, and the token itself. Of tokens that look alike the first counts, or
    the token itself."""
    if record.logprob is None:
        return None
    named: dict[str, float] = {}
    for token_id, logprob in (record.top_logprobs or ())[:num_top]:
        named.setdefault(name(token_id), max(logprob, LOWEST_LOGPROB))
    return {**named, name(record.token_id): max(record.logprob, LOWEST_LOGPROB)}


def _by_id(record: TokenRecord, name: Name, num_top: int) -> dict[int, PromptLogprob] | None:
    if record.logprob is None:
        return None
    top = record.top_logprobs or ()
    ranked = [
        (token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(top[:num_top], start=1)
    ]
    own = (record.token_id, record.logprob, None)
    return {
        token_id: PromptLogprob(
            logprob=max(logprob, LOWEST_LOGPROB), rank=rank, decoded_token=name(token_id)
        )
        for token_id, logprob, rank in [own, *ranked]
    }


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)
