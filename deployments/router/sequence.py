"""One completion's truth: its committed tokens, where its soft state lies, what was streamed."""

import asyncio
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from deployments.router.speculation_counts import SpeculationCounts
from deployments.router.suspicion import Suspicion
from deployments.router.tenants.keys import ANYBODY, Tenant
from deployments.router.text import CompletionText, Decoder
from workers.errors import GenerationFailedError, InvalidRequestError, TandemError
from workers.sampling_params import SamplingParams
from workers.types import Rule, TokenLogprobs, VerifyResult

MAX_SHOWN_ON_LOOP = 2048
"""Ids and log-probabilities that an event loop writes itself, in some 7 ms: for more, other
requests would have to wait."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class Origin(StrEnum):
    """Where a token came from; the target chose all but the prompt's."""

    PROMPT = "prompt"
    ACCEPTED = "accepted"
    """The token was drafted, and the target chose the same."""
    OWN = "own"
    """The target chose it where no draft was left, or where the draft was another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """The validated parameters of one completion."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    seed: int
    verification: Rule = "coupled"
    """The rule by which drafts are judged, if tokens are drawn."""
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    """Whether the text has the stop string, or the text of the token, that ended it."""
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = ""
    num_logprobs: int | None = None
    """Likeliest tokens to name beside each of the completion; None for no log-probabilities."""
    num_prompt_logprobs: int | None = None
    """Likeliest tokens to name beside each of the prompt; None for no log-probabilities."""
    shown_prompt: "ShownPrompt | None" = None
    """The prompt's tokens for the first delta; None if they are not wanted."""
    prediction: tuple[int, ...] = ()
    """What the client expects the completion to be."""
    drafter: str | None = None
    """The only drafter that may draft for it; None for any."""
    max_gamma: int | None = None
    """Draft tokens of a round at most; None for no limit of its own."""
    tenant: Tenant = ANYBODY
    """Whose it is: tenants share a router's slots and take turns with their prompts."""


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
    """The token's log-probability under the target's law; None unless it was asked for, and for a
    prompt's first token."""
    top_logprobs: tuple[tuple[int, float], ...] | None = None
    """(token id, logprob) of the likeliest tokens in its place; None as `logprob` is."""


class ShownPrompt:
    """A prompt's tokens as all of its completions show them; their records are made once."""

    def __init__(self, token_ids: Tokens[int], texts: Tokens[str] = ()) -> None:
        """`texts` are what each token of a prompt that is echoed adds to its text."""
        self._token_ids = token_ids
        self._texts = texts or ("",) * len(token_ids)
        self._records: tuple[TokenRecord, ...] = ()

    def records(self, logprobs: Tokens[TokenLogprobs]) -> tuple["TokenRecord", ...]:
        """The records, with the log-probabilities of the tokens from the second on, if there are
        any; they are the same for every completion of the prompt."""
        if not self._records:
            known: list[TokenLogprobs | None] = [None, *logprobs]
            known += [None] * (len(self._token_ids) - len(known))  # where none are wanted
            offsets = accumulate((len(text) for text in self._texts), initial=0)
            self._records = tuple(
                TokenRecord(
                    token_id=token,
                    text=text,
                    text_offset=offset,
                    origin=Origin.PROMPT,
                    logprob=None if one is None else one.logprob,
                    top_logprobs=None if one is None else one.top,
                )
                for token, text, offset, one in zip(
                    self._token_ids, self._texts, offsets, known, strict=False
                )
            )
        return self._records


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The part of a completion that one commit adds."""

    records: tuple[TokenRecord, ...]
    finish_reason: FinishReason | None = None
    """Set in the last delta of a completion."""
    prompt: tuple[TokenRecord, ...] = ()
    """The prompt's tokens, in the first delta of a request that shows them. They have texts, whose
    offsets are those in the prompt, if it is echoed."""

    @classmethod
    def join(cls, deltas: Tokens["Delta"]) -> "Delta":
        """All of a completion's deltas as one."""
        records = tuple(record for delta in deltas for record in delta.records)
        return cls(records=records, finish_reason=deltas[-1].finish_reason, prompt=deltas[0].prompt)

    @property
    def num_shown(self) -> int:
        """Tokens of it, and of the likeliest in the place of each."""
        return sum(
            len(records) * (1 + len(records[-1].top_logprobs or ()))
            for records in (self.prompt, self.records)
            if records
        )

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(record.token_id for record in self.records)

    @property
    def text(self) -> str:
        return "".join([record.text for record in self.records])


def is_long_to_write(deltas: Iterable[Delta]) -> bool:
    """Whether others would have to wait while these are written."""
    return sum(delta.num_shown for delta in deltas) > MAX_SHOWN_ON_LOOP


@dataclass(slots=True, kw_only=True)
class Placement:
    """Where a worker keeps soft state of the sequence, as far as the router knows."""

    replica_id: str | None = None
    """The replica that has the state; None until one has answered, and again when that one is
    lost."""
    cached_len: int = 0
    """Committed tokens that replica is believed to have cached."""

    def forget(self) -> None:
        self.replica_id = None
        self.cached_len = 0


class Sequence:
    """One completion: the tokens that the target has committed, and where its state lies."""

    def __init__(
        self,
        seq_id: str,
        params: GenerationParams,
        *,
        decoder: Decoder,
        eos_token_ids: Tokens[int],
        emit: Callable[[Delta | TandemError], None],
    ) -> None:
        """It hands every commit to `emit`, and an error instead if it fails."""
        self.seq_id = seq_id
        self.params = params
        own_end_tokens = () if params.ignore_eos else eos_token_ids
        self.end_token_ids = frozenset((*own_end_tokens, *params.sampling.stop_token_ids))
        """Tokens that end the text."""
        self.tokens = list(params.prompt)
        """Committed tokens, prompt included. The newest is cached nowhere yet."""
        self.target = Placement()
        self.counts = SpeculationCounts()
        self.predicted_counts = SpeculationCounts()
        """The part of `counts` that is drafts of the client's prediction."""
        self.suspicion = Suspicion()
        """Whether the sequence ends the workers that run it."""
        self.has_slow_masks = False
        """Whether the target had better be asked for it alone and without drafts: see
        VerifyResult."""
        self.is_cancelled = False
        self.finish_reason: FinishReason | None = None
        self.error: TandemError | None = None
        self.done = asyncio.Event()
        """Set when the stream has ended, with a finish reason or an error."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Log-probabilities of the prompt's tokens from the second on, as far as they have come."""
        self._emit = emit
        self._text = CompletionText(
            decoder,
            prompt=params.prompt,
            stop=params.stop,
            include_stop=params.include_stop,
            num_unstopped=params.sampling.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
        )
        self._text_len = 0

    @property
    def prompt_len(self) -> int:
        return len(self.params.prompt)

    @property
    def is_sampled(self) -> bool:
        return not self.params.sampling.is_greedy

    @property
    def rule(self) -> Rule:
        """See WorkRequest."""
        return self.params.verification if self.is_sampled else "coupled"

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.params.max_tokens - self.num_output_tokens

    @property
    def needs_prompt_logprobs(self) -> bool:
        is_wanted = self.params.num_prompt_logprobs is not None
        return is_wanted and len(self.prompt_logprobs) < self.prompt_len - 1

    @property
    def base_len(self) -> int:
        """Committed tokens that the target need not run again.

        A token that is cached has no logits any more, so a prompt is run from the first token on
        whose follower's log-probability has yet to come.
        """
        if self.needs_prompt_logprobs:
            return min(self.target.cached_len, len(self.prompt_logprobs))
        return self.target.cached_len

    @property
    def is_done(self) -> bool:
        return self.is_cancelled or self.finish_reason is not None or self.error is not None

    def commit(self, result: VerifyResult, *, source: str = "") -> int:
        """Take over what the target answered, up to where the text ends, and emit what that adds.

        The accepted drafts were those of `source`. Returns how many tokens were committed.
        Raises GenerationFailedError if the target cannot go on with the sequence, and
        InvalidRequestError if that is what the request asks for.
        """
        if result.error:
            raise (InvalidRequestError if result.is_refused else GenerationFailedError)(
                result.error
            )
        if result.prompt_logprobs:
            self.prompt_logprobs[self.base_len :] = result.prompt_logprobs
        if result.needs_tokens_from is not None:
            self.target.cached_len = result.needs_tokens_from
            return 0
        if result.is_released or self.is_done:
            return 0
        self.target.cached_len = len(self.tokens) + result.num_accepted
        self.has_slow_masks = result.has_slow_masks
        shown = self.params.shown_prompt if self.num_output_tokens == 0 else None
        prompt = () if shown is None else shown.records(self.prompt_logprobs)
        records: list[TokenRecord] = []
        if self.num_remaining == 0:  # only the prompt is wanted
            self.finish_reason = FinishReason.LENGTH
        for index, token in enumerate(result.tokens):
            if self.finish_reason is not None:
                break
            is_accepted = index < result.num_accepted
            records.append(
                self._append(
                    token,
                    origin=Origin.ACCEPTED if is_accepted else Origin.OWN,
                    source=source if is_accepted else "",
                    logprobs=result.logprobs[index] if result.logprobs else None,
                )
            )
        self._emit(Delta(records=tuple(records), finish_reason=self.finish_reason, prompt=prompt))
        if self.finish_reason is not None:
            self.done.set()
        return len(records)

    def _append(
        self, token: int, *, origin: Origin, source: str, logprobs: TokenLogprobs | None
    ) -> TokenRecord:
        """Commit one token; sets the finish reason if the text ends with it."""
        self.tokens.append(token)
        is_end = token in self.end_token_ids
        text = "" if is_end and not self.params.include_stop else self._text.push(token)
        if is_end or self._text.has_stopped:
            self.finish_reason = FinishReason.STOP
        elif self.num_remaining == 0:
            self.finish_reason = FinishReason.LENGTH
        if self.finish_reason is not None:
            text += self._text.finish()
        record = TokenRecord(
            token_id=token,
            text=text,
            text_offset=self._text_len,
            origin=origin,
            source=source,
            logprob=None if logprobs is None else logprobs.logprob,
            top_logprobs=None if logprobs is None else logprobs.top,
        )
        self._text_len += len(text)
        return record

    def fail(self, error: TandemError) -> None:
        """End the stream with an error."""
        self.error = error
        self._emit(error)
        self.done.set()
