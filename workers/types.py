"""The types that cross a process boundary: what the router sends to workers and gets back.

The router owns the truth (the committed tokens of every sequence); workers hold soft state. So a
request says which tokens its caller believes the worker has (`base_len`) and carries the rest
(`new_tokens`); a worker that has less answers `needs_tokens_from` and is sent the rest again.
"""

from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar


def signed_64(number: int) -> int:
    """The number from -2**63 to 2**63 - 1 that has the same low 64 bits: what a seed may be."""
    return (number + 2**63) % 2**64 - 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the target's next-token law is shaped. The defaults leave it as the model gives it.

    Applied in this order: logit bias, repetition, presence and frequency penalty, temperature,
    top-k, top-p, min-p.
    """

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_k: int = 0
    """0 keeps every token."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides (multiplies) positive (negative) logits of tokens in prompt or output."""
    presence_penalty: float = 0.0
    """Subtracted once for every token that stands in the output."""
    frequency_penalty: float = 0.0
    """Subtracted as often as a token stands in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added to its logit)"""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def is_plain(self) -> bool:
        """Whether the most likely token of the model's own law is taken."""
        return self.is_greedy and not self.has_penalties and not self.logit_bias

    @property
    def is_only_scaled(self) -> bool:
        """Whether the law is the model's own but for its temperature."""
        is_whole = self.top_k == 0 and self.top_p == 1.0 and self.min_p == 0.0
        return is_whole and not self.has_penalties and not self.logit_bias

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTokens:
    """Tokens that a drafter expects to follow the committed ones."""

    tokens: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    """One per token, in (0, 1], or none where the drafter cannot say."""
    source: str = ""
    """Which drafter they are from, such as "model"."""

    def first(self, num_tokens: int) -> "DraftTokens":
        """The first drafts only."""
        if num_tokens >= len(self.tokens):
            return self
        return replace(
            self, tokens=self.tokens[:num_tokens], confidences=self.confidences[:num_tokens]
        )

    def after(self, num_tokens: int) -> "DraftTokens":
        """The drafts that are left without the first ones."""
        return replace(
            self, tokens=self.tokens[num_tokens:], confidences=self.confidences[num_tokens:]
        )

    def __add__(self, other: "DraftTokens") -> "DraftTokens":
        """Both, one after the other; the source is that of the first that has tokens."""
        return DraftTokens(
            tokens=self.tokens + other.tokens,
            confidences=self.confidences + other.confidences,
            source=self.source if self.tokens else other.source,
        )


NO_DRAFTS = DraftTokens()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest:
    """One sequence of a `Target.verify` batch; a prefill is one with many new tokens, no drafts."""

    seq_id: str
    base_len: int
    """Tokens the caller believes to be cached by the target."""
    new_tokens: tuple[int, ...]
    """Committed tokens from `base_len` on; at least one."""
    draft_tokens: tuple[int, ...] = ()
    prompt_len: int
    """The first `prompt_len` tokens are the prompt; penalties on the output start after them."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    cache_salt: str = ""
    """Prompts share cached prefixes with those of the same salt only."""

    @property
    def assumed_tokens(self) -> tuple[int, ...]:
        """None: drafts are judged."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """The target's own tokens: the accepted drafts and one more, or what it lacks."""

    seq_id: str
    tokens: tuple[int, ...] = ()
    num_accepted: int = 0
    """Drafts the target agreed with, without the extra token."""
    num_tested: int = 0
    """Drafts compared with the target's own token: the accepted ones and the first rejected."""
    needs_tokens_from: int | None = None
    """When set, nothing was verified: send the committed tokens from this position on."""
    is_released: bool = False
    """The sequence was released, or asked for again, before its turn came."""
    error: str = ""
    """Why this sequence cannot go on; the worker has forgotten it. Empty if all is well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposeRequest:
    """One sequence of a `Drafter.propose` batch; `k` = 0 only lets the drafter catch up."""

    seq_id: str
    base_len: int
    """Committed tokens the caller believes to be cached by the drafter."""
    new_tokens: tuple[int, ...]
    """Committed tokens from `base_len` on; at least one."""
    assumed_tokens: tuple[int, ...] = ()
    """Tokens that may be committed next: drafts continue from them."""
    k: int
    stop_below: float = 0.0
    """Drafting ends with the draft at which the product of the confidences falls below this."""
    prompt_len: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """The drafter guesses best when it samples by the target's rule, with the target's noise."""
    seed: int = 0
    cache_salt: str = ""
    """Prompts share cached prefixes with those of the same salt only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposeResult:
    """At most k draft tokens, or what the drafter lacks."""

    seq_id: str
    draft_tokens: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    """One per draft token, in (0, 1]: how far ahead of the other tokens it was. Empty where the
    drafter cannot say."""
    needs_tokens_from: int | None = None
    is_released: bool = False
    error: str = ""
    """As in VerifyResult."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a router has to know of a worker before it sends anything."""

    model: str
    """The model id or path the worker loaded."""
    vocab_size: int
    max_model_len: int
    """The longest sequence, prompt and completion, that the worker can hold."""
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    block_size: int


class WorkRequest(Protocol):
    """What verify and propose requests have in common."""

    @property
    def seq_id(self) -> str: ...
    @property
    def base_len(self) -> int: ...
    @property
    def new_tokens(self) -> tuple[int, ...]: ...
    @property
    def assumed_tokens(self) -> tuple[int, ...]: ...
    @property
    def cache_salt(self) -> str: ...


class WorkResult(Protocol):
    """What verify and propose results have in common."""

    @property
    def seq_id(self) -> str: ...
    @property
    def is_released(self) -> bool: ...
    @property
    def error(self) -> str: ...


ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Generic[ResultT]):
    """A worker's answer to one call: the results of the batch, in its order."""

    replica_id: str
    """Who answered, so that the caller can come back to the same cache."""
    compute_s: float
    """Of the call's time, what the worker spent in steps."""
    num_steps: int
    """Steps that ended during the call, whomever they served."""
    num_tokens: int
    """Tokens run in those steps."""
    num_prefill_tokens: int
    """Of prompts that wait to be run, as many as the next step has room for."""
    results: tuple[ResultT, ...]
