"""Messages for the gRPC methods: legal ones, ones at the edge of their types, and mere bytes."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from deployments.api import tandem_pb2
from deployments.api.text_parts import joined
from tandem.fuzz.cases import Body, draw_chat, draw_completion
from tandem.fuzz.keys import WITH_KEY, WITHOUT_KEY

SERVICE = tandem_pb2.DESCRIPTOR.services_by_name["Generation"]
METHODS: dict[str, MethodDescriptor] = dict(SERVICE.methods_by_name)
SHORT_S = (0.001, 0.05)
"""The range of deadlines that few calls meet."""
MAX_DEPTH = 3
EDGES: dict[int, Sequence[Any]] = {
    FieldDescriptor.TYPE_BOOL: (False, True),
    FieldDescriptor.TYPE_DOUBLE: (
        0.0, -0.0, 1.0, -1.0, 2.0, 5e-324, 1e-40, 1e308, float("inf"), -float("inf"), float("nan"),
    ),
    FieldDescriptor.TYPE_INT32: (0, 1, -1, 2, 64, 97, 4095, 2**31 - 1, -(2**31)),
    FieldDescriptor.TYPE_INT64: (0, 1, -1, 2**31, 2**53, 2**63 - 1, -(2**63)),
    FieldDescriptor.TYPE_STRING: (
        "", " ", "a", "\x00", "é", "\U0001f9d1‍\U0001f4bb", "�", "auto", "null",
        "<|endoftext|>", "{", "a" * 300, "def f(x):\n" * 40,
    ),
}  # fmt: skip
"""Values of each type that somebody forgot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a client's."""

    method: str
    raw: bytes
    """The request's bytes, which may be no message."""
    timeout_s: float | None = None
    """A short time that the client gives it; None for enough."""
    is_left: bool = False
    """If true, the client hangs up after the first answer of a stream."""
    authorization: str | None = WITH_KEY[0]
    """What the client sends as its key; None for nothing."""

    def __str__(self) -> str:
        """The call as JSON, from which `read_call` makes it again."""
        return json.dumps({**asdict(self), "raw": self.raw.hex()})

    @property
    def has_key(self) -> bool:
        """Whether its client may be answered."""
        return self.authorization in WITH_KEY

    @property
    def is_stream(self) -> bool:
        return METHODS[self.method].server_streaming


def read_call(line: str) -> Call:
    """The call that was written so."""
    fields = json.loads(line)
    return Call(**{**fields, "raw": bytes.fromhex(fields["raw"])})


def draw_call(rng: random.Random, *, model: str, vocab_size: int) -> Call:
    """A call of any method: half of them legal, or nearly."""
    name = rng.choice([*METHODS, "Generate", "GenerateStream"])
    descriptor = METHODS[name].input_type
    legal = _draw_legal(rng, descriptor, model=model, vocab_size=vocab_size)
    kinds: Sequence[Callable[[], bytes]] = (
        legal.SerializeToString,
        lambda: _changed(rng, legal).SerializeToString(),
        lambda: _draw(rng, descriptor).SerializeToString(),
        lambda: _damaged(rng, legal.SerializeToString()),
        lambda: rng.randbytes(rng.choice((1, 2, 7, 100))),
    )
    (kind,) = rng.choices(kinds, weights=(8, 5, 3, 3, 1))
    return Call(
        method=name,
        raw=kind(),
        timeout_s=rng.uniform(*SHORT_S) if rng.random() < 0.1 else None,
        is_left=METHODS[name].server_streaming and rng.random() < 0.1,
        authorization=_draw_authorization(rng),
    )


def _draw_authorization(rng: random.Random) -> str | None:
    if rng.random() < 0.1:
        return rng.choice(WITHOUT_KEY)
    (with_key,) = rng.choices(WITH_KEY, weights=(3, 1))
    return with_key


def _draw_legal(
    rng: random.Random, descriptor: Descriptor, *, model: str, vocab_size: int
) -> Message:
    """A request that has an answer, made of one of HTTP's."""
    if "messages" in descriptor.fields_by_name:
        body = draw_chat(rng, model=model, vocab_size=vocab_size)
        return _message(descriptor, body)
    body = draw_completion(rng, model=model, vocab_size=vocab_size)
    prompt = body.pop("prompt")
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    return _message(descriptor, {**body, **_prompt_fields(descriptor, prompts[0])})


def _prompt_fields(descriptor: Descriptor, prompt: str | list[int]) -> Body:
    """A prompt in the way that a method has it."""
    if "token_ids" in descriptor.fields_by_name:
        return {"text": prompt} if isinstance(prompt, str) else {"token_ids": {"ids": prompt}}
    if "tokens" in descriptor.fields_by_name:
        return {"tokens": [3, 4, 5] if isinstance(prompt, str) else prompt}
    return {"prompt": prompt if isinstance(prompt, str) else "def f(x):"}


def _message(descriptor: Descriptor, fields: Body) -> Message:
    """A message with those of the fields that it has; null is left out."""
    known = {
        name: _as_in_protobuf(descriptor.fields_by_name[name], value)
        for name, value in fields.items()
        if name in descriptor.fields_by_name and value is not None
    }
    if isinstance(prediction := known.get("prediction"), dict):
        prediction["content"] = joined(prediction["content"], by="")
    for tool in known.get("tools", ()):
        if "parameters" in tool["function"]:
            tool["function"]["parameters"] = json.dumps(tool["function"]["parameters"])
    return json_format.ParseDict(known, GetMessageClass(descriptor)())


def _as_in_protobuf(field: FieldDescriptor, value: Any) -> Any:
    """A value of HTTP's: one of several as a list, and an object that is a text there as JSON."""
    if field.is_repeated and isinstance(value, str):
        return [value]
    is_text = field.type == FieldDescriptor.TYPE_STRING and not field.is_repeated
    return json.dumps(value) if is_text and isinstance(value, dict) else value


def _draw(rng: random.Random, descriptor: Descriptor, depth: int = 0) -> Message:
    """Some of the fields, each with a value at the edge of its type."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if rng.random() < 0.3 and depth < MAX_DEPTH:
            _set(rng, message, field, depth)
    return message


def _changed(rng: random.Random, legal: Message) -> Message:
    """The message with one or two fields at the edge of their types."""
    fields: list[Any] = list(legal.DESCRIPTOR.fields)
    for field in rng.sample(fields, min(len(fields), rng.choice((1, 1, 2)))):
        _set(rng, legal, field, 0)
    return legal


def _set(rng: random.Random, message: Message, field: FieldDescriptor, depth: int) -> None:
    if field.is_repeated:
        message.ClearField(field.name)
        values = getattr(message, field.name)
        for _ in range(rng.choice((0, 1, 2, 17))):
            if field.message_type is None:
                values.append(rng.choice(EDGES[field.type]))
            elif field.message_type.GetOptions().map_entry:
                key, value = field.message_type.fields
                values[rng.choice(EDGES[key.type])] = rng.choice(EDGES[value.type])
            else:
                values.append(_draw(rng, field.message_type, depth + 1))
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(_draw(rng, field.message_type, depth + 1))
    else:
        setattr(message, field.name, rng.choice(EDGES[field.type]))


def _damaged(rng: random.Random, raw: bytes) -> bytes:
    """Bytes that were a message: cut off, with some changed, or with others in between."""
    if not raw:
        return rng.randbytes(3)
    place = rng.randrange(len(raw))
    match rng.randrange(3):
        case 0:
            return raw[:place]
        case 1:
            return raw[:place] + bytes([raw[place] ^ (1 << rng.randrange(8))]) + raw[place + 1 :]
        case _:
            return raw[:place] + rng.randbytes(rng.choice((1, 4))) + raw[place:]
