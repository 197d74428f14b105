"""What router and worker say to each other on a stream, and how it is written down.

A message is a frame: four bytes of length, then JSON of a boundary type, without what has its
default value. JSON is what pydantic can check, and reads faster than pickle here; unpickling what a
port receives would be running it.

The router opens the stream and says the worker's token first. From then on it sends Calls, in any
number at a time, and gets an Answer to each that asks for work.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter

from workers.types import (
    ProposeRequest,
    ProposeResult,
    Reply,
    VerifyRequest,
    VerifyResult,
    WorkRequest,
    WorkResult,
)

LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 64 * 1024**2
# numbers that are not finite arrive as they are, instead of as null, which is no number at all
CONFIG = ConfigDict(ser_json_inf_nan="constants", ser_json_bytes="base64", val_json_bytes="base64")

RequestT = TypeVar("RequestT", bound=WorkRequest)
ResultT = TypeVar("ResultT", bound=WorkResult)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamAddress:
    """Where a replica listens; told only to those who reach it through Ray."""

    replica_id: str
    host: str
    port: int
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """What a replica says of itself to those who ask over Ray."""

    address: StreamAddress
    num_cached_tokens: int
    """Slots of its cache that are in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[RequestT]):
    """`run` serves the batch; `release` forgets seq_ids, and so gives up the calls for them."""

    kind: Literal["run", "release"]
    call_id: int = 0
    batch: tuple[RequestT, ...] = ()
    seq_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Generic[ResultT]):
    """The reply to a `run`, or why it failed: by what it carried, or with a step that ran it."""

    call_id: int
    reply: Reply[ResultT] | None = None
    error: str = ""
    is_lost: bool = False
    """Whether the worker ends by no fault of what it was sent, as far as it knows."""


class Codec(Generic[RequestT, ResultT]):
    """The messages of one kind of worker as bytes."""

    def __init__(self, request: type[RequestT], result: type[ResultT]) -> None:
        # mypy takes no variables as type arguments; pydantic does
        self._call: TypeAdapter[Call[RequestT]] = TypeAdapter(_of(Call, request), config=CONFIG)
        self._answer: TypeAdapter[Answer[ResultT]] = TypeAdapter(_of(Answer, result), config=CONFIG)

    def encode_call(self, call: Call[RequestT]) -> bytes:
        """A call as bytes; raises ValueError if it is too long to be read."""
        return frame(self._call.dump_json(call, exclude_defaults=True))

    def decode_call(self, payload: bytes) -> Call[RequestT]:
        """The call in a message; raises ValueError if that is none."""
        return self._call.validate_json(payload)

    def encode_answer(self, answer: Answer[ResultT]) -> bytes:
        """An answer as bytes; raises ValueError if it is too long to be read."""
        return frame(self._answer.dump_json(answer, exclude_defaults=True))

    def decode_answer(self, payload: bytes) -> Answer[ResultT]:
        """The answer in a message; raises ValueError if that is none."""
        return self._answer.validate_json(payload)


def call_id_of(payload: bytes) -> int | None:
    """The call that a message belongs to which is otherwise not understood, if it says so."""
    try:
        message = json.loads(payload)
    except ValueError:
        return None
    call_id = message.get("call_id") if isinstance(message, dict) else None
    return call_id if isinstance(call_id, int) else None


def _of(generic: Any, argument: type[Any]) -> Any:
    return generic[argument]


VERIFY = Codec(VerifyRequest, VerifyResult)
PROPOSE = Codec(ProposeRequest, ProposeResult)


def frame(payload: bytes) -> bytes:
    """A message as it is written; raises ValueError if it is too long to be read."""
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(payload)} bytes; at most {MAX_MESSAGE_BYTES} are read")
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


class FrameProtocol(asyncio.Protocol, ABC):
    """One end of a stream: gathers frames from the pieces that arrive, and hears them at once.

    A protocol and no StreamReader, which would wake a task for every frame, one turn of the event
    loop later.
    """

    def __init__(self, *, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._received = bytearray()
        self._error: ValueError | None = None
        """What was wrong with the message that ended the stream."""

    @abstractmethod
    def frame_received(self, payload: bytes) -> None:
        """Take a message; raises ValueError if it is none of ours, which ends the stream."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            while (payload := self._take_frame()) is not None:
                self.frame_received(payload)
        except ValueError as error:
            self._error = error
            self.transport.abort()

    def _take_frame(self) -> bytes | None:
        num_bytes = int.from_bytes(self._received[:LENGTH_BYTES], "big")
        if len(self._received) >= LENGTH_BYTES and num_bytes > self._max_bytes:
            raise ValueError(f"a message of {num_bytes} bytes; at most {self._max_bytes} are read")
        end = LENGTH_BYTES + num_bytes
        if len(self._received) < end:
            return None
        payload = bytes(self._received[LENGTH_BYTES:end])
        del self._received[:end]
        return payload
