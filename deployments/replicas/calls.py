"""Calls that wait for a worker, and how far its work had come when they were made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from workers.types import Reply, WorkRequest, WorkResult

RequestT = TypeVar("RequestT", bound=WorkRequest)
ResultT = TypeVar("ResultT", bound=WorkResult)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a worker has done since its start."""

    num_steps: int = 0
    """Steps of the model."""
    num_tokens: int = 0
    """Tokens that were run in these steps."""
    busy_s: float = 0.0
    """Seconds that were spent in these steps."""


@dataclass(slots=True, eq=False, kw_only=True)
class Call(Generic[RequestT, ResultT]):
    batch: Sequence[RequestT]
    answer: Callable[[Reply[ResultT] | Exception], None]
    before: Work
    """What the worker had done when the call came."""
    num_missing: int
    results: dict[str, ResultT] = field(default_factory=dict)
    is_answered: bool = False
