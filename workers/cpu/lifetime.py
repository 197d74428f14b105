"""A process that must not outlive the one that started it."""

import os
import signal
import time

POLL_S = 1.0


def end_with(parent_pid: int) -> None:
    """End all processes of this session, which the caller leads, once its parent is gone."""
    while os.getppid() == parent_pid:
        time.sleep(POLL_S)
    os.killpg(os.getpid(), signal.SIGKILL)
