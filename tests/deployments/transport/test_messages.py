"""What a stream carries arrives as it was; what is absent has its default."""

import dataclasses
import json
from typing import Any

import torch

from deployments.transport.messages import LENGTH_BYTES, PROPOSE, VERIFY, Answer, Call
from workers.draft_law import draft_laws
from workers.sampling_params import SamplingParams
from workers.types import (
    DraftTokens,
    ProposeResult,
    Reply,
    TokenLogprobs,
    VerifyRequest,
    VerifyResult,
)


def test_drafts_ride_both_ways() -> None:
    request = VerifyRequest(
        seq_id="s", base_len=4, new_tokens=(5,), draft_tokens=(6, 7), prompt_len=3, next_k=4
    )
    call = Call(kind="run", call_id=1, batch=(request,))
    assert VERIFY.decode_call(VERIFY.encode_call(call)[LENGTH_BYTES:]) == call
    drafts = DraftTokens(tokens=(8, 9), confidences=(0.5, 0.25), source="early_exit")
    result = VerifyResult(seq_id="s", tokens=(6, 1), num_accepted=1, next_drafts=drafts)
    answer = Answer(call_id=1, reply=make_reply(result, steps_version=2))
    assert VERIFY.decode_answer(VERIFY.encode_answer(answer)[LENGTH_BYTES:]) == answer


def test_laws_ride_both_ways_in_few_bytes() -> None:
    (law,) = draft_laws(torch.zeros(1, 150_000))
    assert law is not None
    packed = (law.pack(), b"", bytes(range(256)))
    result = ProposeResult(seq_id="s", draft_tokens=(7, 8, 9), law=packed)
    answer = Answer(call_id=1, reply=make_reply(result))
    payload = PROPOSE.encode_answer(answer)[LENGTH_BYTES:]
    assert PROPOSE.decode_answer(payload) == answer
    request = VerifyRequest(
        seq_id="s",
        base_len=4,
        new_tokens=(5,),
        draft_tokens=(7, 8, 9),
        draft_law=packed,
        verification="block",
        prompt_len=3,
    )
    call = Call(kind="run", call_id=1, batch=(request,))
    assert VERIFY.decode_call(VERIFY.encode_call(call)[LENGTH_BYTES:]) == call
    alone = Call(kind="run", batch=(dataclasses.replace(request, draft_law=packed[:1]),))
    assert len(VERIFY.encode_call(alone)) < 700  # a law of 64 tokens


def test_log_probabilities_arrive_to_the_last_digit() -> None:
    """The digits are those of float32 as Python has them; a token without a chance has -inf."""
    logprobs = (
        TokenLogprobs(logprob=-0.3010299801826477, top=((7, -1.1754943508222875e-38), (3, -0.1))),
        TokenLogprobs(logprob=-float("inf")),
    )
    request = VerifyRequest(
        seq_id="s",
        base_len=0,
        new_tokens=(5, 6),
        prompt_len=2,
        num_logprobs=0,
        num_prompt_logprobs=3,
    )
    call = Call(kind="run", call_id=1, batch=(request,))
    assert VERIFY.decode_call(VERIFY.encode_call(call)[LENGTH_BYTES:]) == call
    result = VerifyResult(seq_id="s", tokens=(6, 1), logprobs=logprobs, prompt_logprobs=logprobs)
    answer = Answer(call_id=1, reply=make_reply(result))
    assert VERIFY.decode_answer(VERIFY.encode_answer(answer)[LENGTH_BYTES:]) == answer


def test_every_parameter_of_the_sampler_arrives() -> None:
    sampling = SamplingParams(
        min_tokens=3,
        stop_token_ids=(4, 5),
        bad_words=((1,), (2, 3)),
        logit_bias=((1, 0.5),),
        top_k=3,
        top_p=0.25,
    )
    request = VerifyRequest(
        seq_id="s", base_len=0, new_tokens=(5,), prompt_len=1, sampling=sampling
    )
    call = Call(kind="run", call_id=1, batch=(request,))
    assert VERIFY.decode_call(VERIFY.encode_call(call)[LENGTH_BYTES:]) == call


def test_what_has_its_default_is_not_sent() -> None:
    result = VerifyResult(seq_id="s", tokens=(6,))
    payload = VERIFY.encode_answer(Answer(call_id=1, reply=make_reply(result)))[LENGTH_BYTES:]
    assert json.loads(payload)["reply"]["results"] == [{"seq_id": "s", "tokens": [6]}]
    assert "steps_version" not in json.loads(payload)["reply"]
    reply = VERIFY.decode_answer(payload).reply
    assert reply is not None
    assert reply.results == (result,)


def make_reply(result: Any, *, steps_version: int = 0) -> Reply[Any]:
    return Reply(
        replica_id="one",
        compute_s=0.5,
        num_steps=1,
        num_tokens=3,
        num_prefill_tokens=0,
        results=(result,),
        steps_version=steps_version,
    )
