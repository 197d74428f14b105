"""The thread of a worker's steps."""

import os
import threading

from deployments.replicas.step_thread import NICENESS, StepThread


def niceness() -> int:
    """That of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def niceness_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(niceness()))
    thread.start()
    thread.join()
    return found[0]


async def test_steps_and_their_helpers_stand_behind_what_shares_their_cores() -> None:
    own = niceness()
    thread = StepThread()
    try:
        nicer = min(19, own + NICENESS)
        assert nicer > own or own == 19
        assert await thread.make(niceness) == nicer
        assert await thread.make(niceness_of_a_new_thread) == nicer
    finally:
        thread.stop()
    assert niceness() == own
