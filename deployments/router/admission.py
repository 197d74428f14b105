"""Who may run, who waits, who is refused. Pure: the counts are given."""

from dataclasses import dataclass

from workers.errors import OverloadedError

RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    max_running: int
    max_waiting: int


def check_admission(limits: AdmissionLimits, *, num_unfinished: int, num_new: int) -> None:
    """Raise OverloadedError if `num_new` more completions would overfill the waiting queue.

    A request is taken or refused as a whole. `num_unfinished` counts those running and waiting.
    """
    capacity = limits.max_running + limits.max_waiting
    if num_unfinished + num_new > capacity:
        raise OverloadedError(
            f"{num_unfinished} completions are running or waiting and {num_new} more were asked "
            f"for; at most {limits.max_running} run and {limits.max_waiting} wait at a time. "
            "Try again later",
            retry_after_s=RETRY_AFTER_S,
        )
