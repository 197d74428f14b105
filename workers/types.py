"""The types that cross a process boundary: what the router sends to workers and gets back.

The router owns the truth (the committed tokens of every sequence); workers hold soft state. So a
request says which tokens its caller believes the worker has (`base_len`) and carries the rest
(`new_tokens`); a worker that has less answers `needs_tokens_from` and is sent the rest again.
"""

from dataclasses import dataclass, field, replace
from typing import Generic, Literal, TypeVar

from workers.sampling_params import SamplingParams

Rule = Literal["coupled", "rejection", "block"]
"""The rules by which drafts are judged; see `workers.verification`."""
HeterogeneousVocab = Literal["auto", "intersection", "retokenize"]
"""What is done with a draft that has other tokens than its target; see `workers.vocabulary`."""
MAX_CATCH_UP = 16
"""Tokens to run besides drafts up to which a request is served whole, in the next step."""


def is_prefill_len(num_tokens: int) -> bool:
    """Whether so many tokens are run as a prefill: in chunks, within a step's token budget."""
    return num_tokens > MAX_CATCH_UP


def signed_64(number: int) -> int:
    """The number from -2**63 to 2**63 - 1 that has the same low 64 bits: what a seed may be."""
    return (number + 2**63) % 2**64 - 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTokens:
    """Tokens that a drafter expects to follow the committed ones."""

    tokens: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    """The drafter's confidence in each token, in (0, 1], or none where it cannot say."""
    source: str = ""
    """The name of the drafter that they are from, such as "model"."""
    law: tuple[bytes, ...] = ()
    """The law that each token was drawn from, as `workers.draft_law` packs it; empty bytes for one
    about which there was no choice. None at all where there was none about any, or the rule of the
    sequence compares no laws."""

    def first(self, num_tokens: int) -> "DraftTokens":
        """The first `num_tokens` of the drafts."""
        if num_tokens >= len(self.tokens):
            return self
        return replace(
            self,
            tokens=self.tokens[:num_tokens],
            confidences=self.confidences[:num_tokens],
            law=self.law[:num_tokens],
        )

    def after(self, num_tokens: int) -> "DraftTokens":
        """The drafts that are left without the first ones."""
        return replace(
            self,
            tokens=self.tokens[num_tokens:],
            confidences=self.confidences[num_tokens:],
            law=self.law[num_tokens:],
        )

    def __add__(self, other: "DraftTokens") -> "DraftTokens":
        """The drafts of both in turn; the source is that of the first that has tokens."""
        return DraftTokens(
            tokens=self.tokens + other.tokens,
            confidences=self.confidences + other.confidences,
            source=self.source if self.tokens else other.source,
            law=self._law_of_each + other._law_of_each if self.law or other.law else (),
        )

    @property
    def _law_of_each(self) -> tuple[bytes, ...]:
        return self.law or (b"",) * len(self.tokens)


NO_DRAFTS = DraftTokens()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """How likely a token was, by the model's own law, and which tokens were the likeliest."""

    logprob: float
    """The token's natural log-probability."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the likeliest tokens in its place, the likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkRequest:
    """What a verification and a request for drafts have in common: one sequence of a batch."""

    seq_id: str
    base_len: int
    """Committed tokens that the caller believes to be cached by the worker."""
    new_tokens: tuple[int, ...]
    """Committed tokens from `base_len` on; at least one."""
    prompt_len: int
    """The first `prompt_len` tokens are the prompt; penalties on the output start after them."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How tokens are chosen; AS_BEFORE only where `base_len` is above 0."""
    seed: int = 0
    verification: Rule = "coupled"
    """The rule that is asked for; see `rule`."""
    cache_salt: str = ""
    """Prompts share cached prefixes with those of the same salt only."""
    tenant: str = ""
    """Whose sequence it is: prompts of several tenants take turns."""
    weight: float = 1.0
    """The tenant's share of what is run of prompts, next to the weights of others; above 0."""

    @property
    def rule(self) -> Rule:
        """The rule by which drafts are judged: where nothing is drawn, all rules are this one."""
        return "coupled" if self.sampling.is_greedy else self.verification

    @property
    def given_tokens(self) -> tuple[int, ...]:
        """The tokens from `base_len` on that are run as they are, whatever the worker decides."""
        return self.new_tokens

    @property
    def may_reuse(self) -> bool:
        """Whether tokens from `base_len` on that the worker has cached need not be run again."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkResult:
    """What the answers to both kinds of request have in common."""

    seq_id: str
    needs_tokens_from: int | None = None
    """When set, nothing was done: send the committed tokens from this position on."""
    is_released: bool = False
    """The sequence was released, or asked for again, before its turn came."""
    error: str = ""
    """Why this sequence cannot go on; the worker has forgotten it. Empty if all is well."""
    is_refused: bool = False
    """Whether what the request asks for is the cause of the error, not the model or a defect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest(WorkRequest):
    """One sequence of a `Target.verify` batch; a prefill is one with many new tokens, no drafts."""

    draft_tokens: tuple[int, ...] = ()
    draft_law: tuple[bytes, ...] = ()
    """See DraftTokens."""
    next_k: int = 0
    """Drafts for the next round that the answer is to bring: of a target with early exit."""
    next_stop_below: float = 0.0
    """Where those may stop; see ProposeRequest."""
    num_logprobs: int | None = None
    """How many of the likeliest tokens to name beside each token of the answer, with
    log-probabilities. None: no log-probabilities are wanted."""
    num_prompt_logprobs: int | None = None
    """How many tokens to name beside each token of the prompt behind position `base_len`; None for
    no log-probabilities."""

    @property
    def may_reuse(self) -> bool:
        """Whether cached tokens of the prompt need not be run again: they have no logits any more,
        which log-probabilities need."""
        return self.num_prompt_logprobs is None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult(WorkResult):
    """The target's own tokens: the accepted drafts and one more."""

    tokens: tuple[int, ...] = ()
    num_accepted: int = 0
    """Drafts the target agreed with, without the extra token."""
    num_tested: int = 0
    """Drafts compared with the target's own token: the accepted ones and the first rejected."""
    has_slow_masks: bool = False
    """Whether the sequence's grammar takes long over each mask: others should not wait for it."""
    next_drafts: DraftTokens = NO_DRAFTS
    """At most `next_k` drafts that follow `tokens`."""
    drafting_s: float = 0.0
    """Seconds of the step that went into drafts for the next round, of all its sequences."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """The log-probability of each of `tokens`, if those were wanted."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """The log-probabilities of the prompt's tokens from position `base_len` + 1 on, if they were
    wanted; as many as were run where the rest is asked for again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposeRequest(WorkRequest):
    """One sequence of a `Drafter.propose` batch; `k` = 0 only lets the drafter catch up.

    A drafter guesses best when it samples as the target does: hence `sampling` and `seed`. Under
    the coupled rule it draws with the target's own noise; under any other it must not, and says
    what law it drew from.
    """

    assumed_tokens: tuple[int, ...] = ()
    """Tokens that may be committed next: drafts continue from them."""
    k: int
    stop_below: float = 0.0
    """Drafting ends with the draft at which the product of the confidences falls below this."""

    @property
    def given_tokens(self) -> tuple[int, ...]:
        """The new tokens, and the assumed ones after them."""
        return self.new_tokens + self.assumed_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposeResult(WorkResult):
    """At most k draft tokens."""

    draft_tokens: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    """One per draft token, in (0, 1]: how far ahead of the others it was; empty if unknown."""
    law: tuple[bytes, ...] = ()
    """See DraftTokens."""
    further_s: float = field(default=0.0, compare=False)
    """Seconds of the step that went into further drafts than the first, of all its sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """How long a worker's step takes that runs some tokens of some sequences and samples."""

    num_sequences: int
    num_tokens: int
    """New tokens of all sequences together, each of which is sampled at."""
    seconds: float
    """The fastest of a few steps behind a short context; never more than that of a larger step."""


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
    weight_bytes: int = 0
    """Bytes of the weights that each rank holds."""
    quantization: str = "none"
    """How the weights were quantized as they were loaded."""
    step_times: tuple[StepTime, ...] = ()
    """The worker's own steps, measured when it started and anew when a compiled forward took over;
    a drafter's are single draft steps, of one token per sequence."""
    steps_version: int = 0
    """How often `step_times` was measured anew; see Reply."""


ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Generic[ResultT]):
    """A worker's answer to one call: the results of the batch, in its order."""

    replica_id: str
    """The replica that answered, so that the caller can come back to the same cache."""
    compute_s: float
    """Seconds that the worker spent in steps during the call."""
    num_steps: int
    """Steps that ended during the call, whomever they served."""
    num_tokens: int
    """Tokens run in those steps."""
    num_prefill_tokens: int
    """Tokens of prompts that wait to be run, as many as the next step has room for."""
    results: tuple[ResultT, ...]
    steps_version: int = 0
    """Rises when the worker has measured its steps anew: `info` has the new times."""
