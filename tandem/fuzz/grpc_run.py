"""Calls of the gRPC methods in batches, and what must hold of each of them."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from deployments.api import tandem_pb2
from tandem.fuzz.grpc_server import grpc_channel
from tandem.fuzz.messages import METHODS, SERVICE, Call, draw_call
from tandem.fuzz.rig import MAX_REQUEST_BYTES, MODEL_NAME, Rig, Subject, open_rig

logger = logging.getLogger(__name__)

BATCH_SIZE = 20
TIMEOUT_S = 60.0
MAX_FINDINGS = 20
INNOCENT = tandem_pb2.GenerateRequest(
    token_ids=tandem_pb2.TokenIds(ids=[3, 7, 11, 5, 13]), max_tokens=24, temperature=0.8, seed=1
)
"""Asked after each batch: its answer is always the same."""
TEXT_METHODS = ("Generate", "GenerateStream")
"""The methods whose answers have one text, or the pieces of one."""
CODES = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
"""The ends that a call may have which has a key and waits for its end."""
CODES_OF_STRANGERS = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.INVALID_ARGUMENT,  # of bytes that are no message: the proxy has no keys
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcFinding:
    """Something that must not be, and the calls of the batch in which it was."""

    reason: str
    calls: tuple[Call, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.reason}; the calls are", *map(str, self.calls)])


@dataclass(slots=True, kw_only=True)
class GrpcReport:
    num_calls: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    findings: list[GrpcFinding] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """How a call ended."""

    code: grpc.StatusCode
    details: str = ""
    answers: tuple[bytes, ...] = ()


async def run_grpc_fuzz(subject: Subject, *, num_calls: int, seed: int) -> GrpcReport:
    """Draw calls and make them; the same seed draws the same."""
    rng = random.Random(seed)
    report = GrpcReport()
    expected: _End | None = None
    while report.num_calls < num_calls and len(report.findings) < MAX_FINDINGS:
        async with (
            open_rig(subject) as rig,
            grpc_channel(rig.service, max_request_bytes=MAX_REQUEST_BYTES) as channel,
        ):
            rig.use_gamma(5)
            expected = expected or await _ask_innocent(channel)
            while report.num_calls < num_calls and len(report.findings) < MAX_FINDINGS:
                size = min(BATCH_SIZE, num_calls - report.num_calls)
                calls = tuple(
                    draw_call(rng, model=MODEL_NAME, vocab_size=subject.target.vocab_size)
                    for _ in range(size)
                )
                report.num_calls += size
                reason = await _try_batch(rig, channel, calls, expected, report)
                if reason is not None:
                    report.findings.append(GrpcFinding(reason=reason, calls=calls))
                    logger.warning("%s", report.findings[-1])
                    break  # what has failed may be broken: the next are tried on a new one
    return report


async def replay_calls(subject: Subject, calls: Sequence[Call]) -> str | None:
    """Make given calls together on an app of their own; a sentence if they fail."""
    async with (
        open_rig(subject) as rig,
        grpc_channel(rig.service, max_request_bytes=MAX_REQUEST_BYTES) as channel,
    ):
        expected = await _ask_innocent(channel)
        return await _try_batch(rig, channel, calls, expected, GrpcReport())


async def _try_batch(
    rig: Rig,
    channel: grpc.aio.Channel,
    calls: Sequence[Call],
    expected: _End,
    report: GrpcReport,
) -> str | None:
    """A sentence about why a batch fails; None if it does not."""
    ends = await asyncio.gather(*[_make(channel, call) for call in calls])
    report.codes.update(end.code.name for end in ends)
    for call, end in zip(calls, ends, strict=True):
        if (reason := _fault(call, end)) is not None:
            return f"{call.method}: {reason}; the call is {call}"
    if (held := await rig.what_is_held()) is not None:
        return f"afterwards: {held}"
    if complaints := rig.take_complaints():
        return f"the log says: {complaints[0]}"
    if (end := await _ask_innocent(channel)) != expected:
        return f"an innocent request had {end}, not {expected}"
    return None


async def _ask_innocent(channel: grpc.aio.Channel) -> _End:
    """The tokens of a request that nothing may change."""
    end = await _make(channel, Call(method="Generate", raw=INNOCENT.SerializeToString()))
    response = tandem_pb2.GenerateResponse.FromString(b"".join(end.answers))
    tokens = ",".join(map(str, response.token_ids))
    return _End(code=end.code, details=end.details or tokens)


async def _make(channel: grpc.aio.Channel, call: Call) -> _End:
    path = f"/{SERVICE.full_name}/{call.method}"
    timeout_s = call.timeout_s or TIMEOUT_S
    sent = call.authorization
    metadata = grpc.aio.Metadata(*([] if sent is None else [("authorization", sent)]))
    answers: list[bytes] = []
    try:
        if not call.is_stream:
            unary: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
            answers.append(await unary(call.raw, timeout=timeout_s, metadata=metadata))
        else:
            stream: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(path)
            running = stream(call.raw, timeout=timeout_s, metadata=metadata)
            async for answer in running:
                answers.append(answer)
                if call.is_left:
                    running.cancel()
                    return _End(code=grpc.StatusCode.CANCELLED)
    except grpc.aio.AioRpcError as error:
        return _End(code=error.code(), details=error.details() or "")
    return _End(code=grpc.StatusCode.OK, answers=tuple(answers))


def _fault(call: Call, end: _End) -> str | None:
    """What is wrong with the end of a call, in words."""
    if _is_ended_by_client(call, end):
        return None
    if end.code not in (CODES if call.has_key else CODES_OF_STRANGERS):
        return f"it ends with {end.code.name}: {end.details}"
    if "Traceback" in end.details or 'File "' in end.details:
        return f"its status has a traceback: {end.details}"
    if end.code is not grpc.StatusCode.OK:
        return None if end.details else f"its status {end.code.name} says nothing"
    if call.is_stream and not end.answers:
        return "a stream ends well without an answer"
    return _fault_of_text(call, end) if call.method in TEXT_METHODS else None


def _is_ended_by_client(call: Call, end: _End) -> bool:
    if end.code is grpc.StatusCode.CANCELLED:
        return call.is_left
    return end.code is grpc.StatusCode.DEADLINE_EXCEEDED and call.timeout_s is not None


def _fault_of_text(call: Call, end: _End) -> str | None:
    output = GetMessageClass(METHODS[call.method].output_type)
    last: Any = output.FromString(end.answers[-1])
    asked = tandem_pb2.GenerateRequest.FromString(call.raw)
    if not last.finish_reason:
        return f"a text has no end: {last}"
    num_completions = max(1, asked.n, asked.best_of)
    if asked.max_tokens and last.usage.completion_tokens > asked.max_tokens * num_completions:
        return f"{last.usage.completion_tokens} tokens, more than were asked for"
    return None
