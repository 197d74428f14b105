"""Admission: a router takes so many completions at a time, and refuses further ones with 429.

A completion counts from before it is tokenized until it has ended.
"""

from dataclasses import dataclass
from types import TracebackType
from typing import Self

from workers.errors import InvalidRequestError, OverloadedError

RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    max_running: int
    max_waiting: int

    @property
    def capacity(self) -> int:
        return self.max_running + self.max_waiting


class Admission:
    """Counts the completions that run or wait in one router."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self.num_unfinished = 0

    def reserve(self, num_new: int) -> "Reservation":
        """Let a request of `num_new` completions in, as a whole, to be used as a context manager.

        The room is taken at once, so nothing may be awaited between this call and the `with`.
        Raises InvalidRequestError if the request can never fit, OverloadedError if it does not now.
        """
        limits = self._limits
        if num_new > limits.capacity:
            raise InvalidRequestError(
                f"the request asks for {num_new} completions (its prompts times n), but at most "
                f"{limits.capacity} fit this server: {limits.max_running} that run and "
                f"{limits.max_waiting} that wait; send fewer at a time",
                field="n",
            )
        if self.num_unfinished + num_new > limits.capacity:
            raise OverloadedError(
                f"{self.num_unfinished} completions are running or waiting and {num_new} more were "
                f"asked for; at most {limits.max_running} run and {limits.max_waiting} wait at a "
                "time. Try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        return Reservation(self, num_new)


class Reservation:
    """Room for the completions of one request; what is still held at its end is given back."""

    def __init__(self, admission: Admission, num_held: int) -> None:
        self._admission = admission
        self._num_held = num_held
        admission.num_unfinished += num_held

    def release_one(self) -> None:
        """One completion has finished; a request that has ended holds nothing any more."""
        self._release(min(1, self._num_held))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._release(self._num_held)

    def _release(self, num: int) -> None:
        self._num_held -= num
        self._admission.num_unfinished -= num
