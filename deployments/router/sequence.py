"""One completion's truth: its committed tokens, where its soft state lies, what was streamed."""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import StrEnum

from deployments.router.text import CompletionText, Decoder
from workers.errors import TandemError
from workers.types import SamplingParams


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class Origin(StrEnum):
    """Where a token came from; either way the target chose it."""

    ACCEPTED = "accepted"
    """It was drafted, and the target chose the same."""
    OWN = "own"
    """The target chose it where no draft was left, or where the draft was another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """The validated parameters of one completion."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    seed: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    cache_salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """One committed token and what it adds to the text.

    The texts of a completion's records make its text exactly. A token that ends inside a character
    or inside what may become a stop string has no text yet; the token that settles it has it all.
    """

    token_id: int
    text: str
    text_offset: int
    """Characters of the completion before this token's text."""
    origin: Origin
    source: str = ""
    """Which drafter an accepted token came from; empty for the target's own."""
    logprob: float | None = None
    """The token's log-probability under the target's law; None until logprobs are served."""
    top_logprobs: tuple[tuple[int, float], ...] | None = None
    """(token id, logprob) of the likeliest tokens in its place; None until logprobs are served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The part of a completion that one commit adds."""

    records: tuple[TokenRecord, ...]
    finish_reason: FinishReason | None = None
    """Set in the last delta of a completion."""

    @classmethod
    def join(cls, deltas: Tokens["Delta"]) -> "Delta":
        """All of a completion's deltas as one."""
        records = tuple(record for delta in deltas for record in delta.records)
        return cls(records=records, finish_reason=deltas[-1].finish_reason)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(record.token_id for record in self.records)

    @property
    def text(self) -> str:
        return "".join([record.text for record in self.records])


@dataclass(slots=True, kw_only=True)
class Placement:
    """Where a worker keeps soft state of the sequence, as far as the router knows."""

    replica_id: str | None = None
    """None until a replica has answered, and again when that one is lost."""
    cached_len: int = 0
    """Committed tokens that replica is believed to have cached."""

    def forget(self) -> None:
        self.replica_id = None
        self.cached_len = 0


@dataclass(slots=True, kw_only=True)
class SpeculationCounts:
    """Counts of a sequence's drafts; those tested and accepted count as far as its text goes."""

    num_rounds: int = 0
    """Rounds in which drafts of it were tested."""
    num_draft_tokens: int = 0
    num_tested: int = 0
    num_accepted: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    seq_id: str
    params: GenerationParams
    eos_token_ids: frozenset[int]
    tokens: list[int]
    """Committed tokens, prompt included. The newest is cached nowhere yet."""
    target: Placement = field(default_factory=Placement)
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    is_cancelled: bool = False
    finish_reason: FinishReason | None = None
    error: TandemError | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the stream has ended, with a finish reason or an error."""
    _emit: Callable[[Delta | TandemError], None]
    _text: CompletionText
    _text_len: int = 0

    @classmethod
    def open(
        cls,
        seq_id: str,
        params: GenerationParams,
        *,
        decoder: Decoder,
        eos_token_ids: Tokens[int],
        emit: Callable[[Delta | TandemError], None],
    ) -> "Sequence":
        """A sequence that hands every commit to `emit`, and an error instead if it fails."""
        return cls(
            seq_id=seq_id,
            params=params,
            eos_token_ids=frozenset(() if params.ignore_eos else eos_token_ids),
            tokens=list(params.prompt),
            _emit=emit,
            _text=CompletionText(decoder, prompt=params.prompt, stop=params.stop),
        )

    @property
    def prompt_len(self) -> int:
        return len(self.params.prompt)

    @property
    def is_sampled(self) -> bool:
        return not self.params.sampling.is_greedy

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.params.max_tokens - self.num_output_tokens

    @property
    def is_done(self) -> bool:
        return self.is_cancelled or self.finish_reason is not None or self.error is not None

    def commit(self, tokens: Tokens[int], *, num_accepted: int = 0, source: str = "") -> int:
        """Take over tokens of the target, up to where the text ends, and emit what they add.

        The first `num_accepted` of them were drafts of `source`. Returns how many were committed.
        """
        assert not self.is_done
        records = []
        for index, token in enumerate(tokens):
            is_accepted = index < num_accepted
            records.append(
                self._append(
                    token,
                    origin=Origin.ACCEPTED if is_accepted else Origin.OWN,
                    source=source if is_accepted else "",
                )
            )
            if self.finish_reason is not None:
                break
        self._emit(Delta(records=tuple(records), finish_reason=self.finish_reason))
        if self.finish_reason is not None:
            self.done.set()
        return len(records)

    def _append(self, token: int, *, origin: Origin, source: str) -> TokenRecord:
        """Commit one token; sets the finish reason if the text ends with it."""
        self.tokens.append(token)
        is_end = token in self.eos_token_ids
        text = "" if is_end else self._text.push(token)
        if is_end or self._text.has_stopped:
            self.finish_reason = FinishReason.STOP
        elif self.num_remaining == 0:
            self.finish_reason = FinishReason.LENGTH
        if self.finish_reason is not None:
            text += self._text.finish()
        record = TokenRecord(
            token_id=token, text=text, text_offset=self._text_len, origin=origin, source=source
        )
        self._text_len += len(text)
        return record

    def fail(self, error: TandemError) -> None:
        """End the stream with an error."""
        self.error = error
        self._emit(error)
        self.done.set()
