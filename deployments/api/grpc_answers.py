"""What gRPC's answers say of a generation: texts, tokens, usage."""

from typing import Any

from deployments.api import tandem_pb2
from deployments.router.generation import Generation
from deployments.router.sequence import Delta, TokenRecord


def parts_of(delta: Delta) -> dict[str, Any]:
    """What chunks and responses say of a text, in the same fields. A prompt has text if echoed."""
    return {
        "text": "".join([record.text for record in delta.prompt]) + delta.text,
        "token_ids": delta.token_ids,
        "finish_reason": delta.finish_reason or "",
        "tokens": [_record(record) for record in delta.records if record.logprob is not None],
        "prompt": map(_record, delta.prompt),
    }


def chunk_of(
    generation: Generation, index: int, delta: Delta, *, is_last: bool
) -> tandem_pb2.GenerateChunk:
    """What a commit adds to a completion; the last one of all has the usage."""
    return tandem_pb2.GenerateChunk(
        id=f"cmpl-{generation.id}",
        index=index,
        usage=usage_of(generation) if is_last else None,
        **parts_of(delta),
    )


def completion_of(completion: Delta) -> tandem_pb2.Completion:
    return tandem_pb2.Completion(**parts_of(completion))


def usage_of(
    generation: Generation, *, num_reasoning_tokens: int | None = None
) -> tandem_pb2.Usage:
    """The usage so far; the tokens of thoughts are those that the caller has found."""
    usage = generation.usage
    return tandem_pb2.Usage(
        prompt_tokens=usage.num_prompt_tokens,
        completion_tokens=usage.num_completion_tokens,
        accepted_prediction_tokens=usage.num_accepted,
        rejected_prediction_tokens=usage.num_rejected,
        reasoning_tokens=num_reasoning_tokens,
        speculation=tandem_pb2.SpeculationUsage(
            rounds=usage.speculation.num_rounds,
            drafted_tokens=usage.speculation.num_draft_tokens,
            tested_tokens=usage.speculation.num_tested,
            accepted_tokens=usage.speculation.num_accepted,
            accepted_by_position=usage.speculation.accepted_by_position,
            tokens_per_verify=usage.speculation.tokens_per_verify,
        ),
    )


def _record(record: TokenRecord) -> tandem_pb2.TokenRecord:
    return tandem_pb2.TokenRecord(
        id=record.token_id,
        text=record.text,
        text_offset=record.text_offset,
        logprob=record.logprob,
        top_logprobs=[
            tandem_pb2.TokenLogprob(id=token_id, logprob=logprob)
            for token_id, logprob in record.top_logprobs or ()
        ],
    )
