"""A request's truth: its committed tokens, where its soft state lies, and what was streamed."""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import StrEnum

from deployments.router.text import Decoder, IncrementalDecoder, StopStrings
from workers.errors import TandemError
from workers.types import SamplingParams


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """What one completion was asked for, validated."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    seed: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    cache_salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one commit adds to a stream."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None


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
    """What became of a sequence's drafts."""

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_tested: int = 0
    num_accepted: int = 0

    def add(self, other: "SpeculationCounts") -> None:
        self.num_rounds += other.num_rounds
        self.num_draft_tokens += other.num_draft_tokens
        self.num_tested += other.num_tested
        self.num_accepted += other.num_accepted


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    seq_id: str
    params: GenerationParams
    eos_token_ids: frozenset[int]
    tokens: list[int]
    """Committed tokens, prompt included. The newest is cached nowhere yet."""
    target: Placement = field(default_factory=Placement)
    draft: Placement = field(default_factory=Placement)
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    is_cancelled: bool = False
    finish_reason: FinishReason | None = None
    error: TandemError | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the stream has ended, with a finish reason or an error."""
    _emit: Callable[[Delta | TandemError], None]
    _decoder: IncrementalDecoder
    _stop: StopStrings

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
            _decoder=IncrementalDecoder(decoder, params.prompt),
            _stop=StopStrings(params.stop),
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

    def commit(self, tokens: Tokens[int]) -> int:
        """Take over tokens of the target, up to where the text ends; emit what they add.

        Returns how many were committed.
        """
        assert not self.is_done
        text, committed = "", []
        for token in tokens:
            committed.append(token)
            self.tokens.append(token)
            is_end = token in self.eos_token_ids
            if not is_end:
                text += self._stop.push(self._decoder.push(token))
            if is_end or self._stop.has_stopped:
                self.finish_reason = FinishReason.STOP
            elif self.num_remaining == 0:
                self.finish_reason = FinishReason.LENGTH
            if self.finish_reason is not None:
                break
        if self.finish_reason is not None and not self._stop.has_stopped:
            text += self._stop.push(self._decoder.finish())
            if not self._stop.has_stopped:
                text += self._stop.finish()
        self._emit(Delta(token_ids=tuple(committed), text=text, finish_reason=self.finish_reason))
        if self.finish_reason is not None:
            self.done.set()
        return len(committed)

    def fail(self, error: TandemError) -> None:
        """End the stream with an error."""
        self.error = error
        self._emit(error)
        self.done.set()
