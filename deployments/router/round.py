"""What a round sends to the target, what comes of the answer, and what is recorded of it."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from deployments.router.drafting import predicted
from deployments.router.drafting.early_exit import NextDrafts
from deployments.router.policy.gamma import ObservedRound, Outcome
from deployments.router.sequence import Sequence
from deployments.router.speculation import Speculated
from workers.sampling_params import AS_BEFORE
from workers.types import NO_DRAFTS, DraftTokens, Reply, VerifyRequest, VerifyResult, is_prefill_len


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTimes:
    """Where the seconds of a round went, clean or not."""

    draft_s: float
    verify_s: float
    total_s: float

    @property
    def router_s(self) -> float:
        """The router's own time: neither drafting nor verifying."""
        return self.total_s - self.draft_s - self.verify_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord(ObservedRound):
    """What one round did and where its time went; told to the metrics."""

    is_prefill: bool
    """Whether a sequence without its cache was verified."""
    times: RoundTimes


class RoundObserver(Protocol):
    def observe_round(self, record: RoundRecord) -> None: ...

    def observe_live(self, num_live: int) -> None:
        """The router has so many sequences now."""
        ...


def verify_request(sequence: Sequence, speculated: Speculated) -> VerifyRequest:
    base_len, params = sequence.base_len, sequence.params
    draft = speculated.drafts.get(sequence.seq_id, NO_DRAFTS)
    ahead = speculated.ahead.get(sequence.seq_id, NextDrafts(k=0))
    return VerifyRequest(
        seq_id=sequence.seq_id,
        base_len=base_len,
        new_tokens=tuple(sequence.tokens[base_len:]),
        draft_tokens=draft.tokens,
        draft_law=draft.law,
        next_k=ahead.k,
        next_stop_below=ahead.stop_below,
        prompt_len=sequence.prompt_len,
        sampling=params.sampling if base_len == 0 else AS_BEFORE,
        seed=params.seed,
        verification=params.verification,
        cache_salt=params.cache_salt,
        tenant=params.tenant.name,
        weight=params.tenant.weight,
        num_logprobs=params.num_logprobs,
        num_prompt_logprobs=params.num_prompt_logprobs if sequence.needs_prompt_logprobs else None,
    )


def is_prefill(request: VerifyRequest) -> bool:
    """Whether the target has to run more than what a round adds."""
    return request.base_len == 0 or is_prefill_len(len(request.new_tokens))


def outcome(
    sequence: Sequence, draft: DraftTokens, result: VerifyResult, *, num_committed: int
) -> Outcome:
    """What became of a sequence's drafts; counted for its usage as far as it stands in the text."""
    outcome = Outcome(
        seq_id=sequence.seq_id,
        num_draft_tokens=len(draft.tokens),
        num_tested=result.num_tested,
        num_accepted=result.num_accepted,
        num_committed=num_committed,
        confidences=draft.confidences,
        is_sampled=sequence.is_sampled,
        rule=sequence.rule,
        source=draft.source,
    )
    sequence.counts.add(outcome)
    if draft.source == predicted.SOURCE:
        sequence.predicted_counts.add(outcome)
    return outcome


def record_round(
    speculated: Speculated,
    batch: SequenceOf[VerifyRequest],
    reply: Reply[VerifyResult],
    outcomes: tuple[Outcome, ...],
    *,
    num_committed: int,
    is_beside_prompts: bool,
    is_overlapped: bool,
    verify_s: float,
    total_s: float,
) -> RoundRecord:
    """What a round did; its times are left out for the policies where they are not clean."""
    is_prefilled = any(map(is_prefill, batch))
    has_waited = any(result.has_slow_masks for result in reply.results)
    is_clean = not (is_prefilled or is_beside_prompts or is_overlapped or has_waited)
    is_alone = reply.num_steps == 1 and is_clean
    num_own = sum(len(request.new_tokens) + len(request.draft_tokens) for request in batch)
    ahead_s = max((result.drafting_s for result in reply.results), default=0.0)
    times = RoundTimes(
        draft_s=speculated.draft_s + ahead_s, verify_s=verify_s - ahead_s, total_s=total_s
    )
    return RoundRecord(
        reason=speculated.reason,
        outcomes=outcomes,
        num_sequences=len(batch),
        num_drafted=speculated.num_drafted,
        longest_draft=speculated.longest_draft,
        num_tokens=reply.num_tokens,
        num_committed=num_committed,
        draft_s=speculated.draft_s if speculated.is_typical else None,
        draft_compute_s=speculated.compute_s,
        draft_further_s=speculated.further_s,
        verify_s=verify_s - ahead_s if is_alone else None,
        verify_compute_s=reply.compute_s - ahead_s,
        num_ahead=sum(request.next_k > 0 for request in batch),
        longest_ahead=max(len(result.next_drafts.tokens) for result in reply.results),
        ahead_s=ahead_s if is_alone and reply.num_tokens <= num_own else None,
        router_s=times.router_s,
        round_s=total_s,
        is_overlapped=is_overlapped,
        is_after_overlap=speculated.is_after_overlap,
        is_prefill=is_prefilled,
        times=times,
    )
