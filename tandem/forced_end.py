"""The end of a process whose main thread hears no signal, as a call of Ray holds it up.

`timeout` and systemd signal a whole process group, which ends Ray's own processes at once. A call
that waits for them then does so for a minute, and Python's handlers of signals wait for the call.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

from tandem.signals import SIGNALS

HEARD_S = 3.0
"""How long the main thread may take until it hears a signal."""
ENDED_S = 20.0
"""How long it may take to end in order."""


@contextmanager
def ended_by_force(
    is_heard: Callable[[], bool], *, heard_s: float = HEARD_S, ended_s: float = ENDED_S
) -> Iterator[None]:
    """End the process with its children where a signal comes in the block and does not end that.

    To be entered in the main thread. `is_heard` tells whether that has begun to end in order.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    has_left = threading.Event()

    def wait() -> None:
        with reader:
            number = _first_signal(reader)
        if number is None or has_left.wait(heard_s):
            return
        if is_heard() and has_left.wait(ended_s):
            return
        try:
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):  # it has ended meanwhile
                    child.kill()
        finally:
            os._exit(128 + number)

    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=wait, name="forced end", daemon=True).start()
    try:
        yield
    finally:
        has_left.set()
        signal.set_wakeup_fd(before)
        writer.close()


def _first_signal(reader: socket.socket) -> int | None:
    """The number of the first signal that asks to end; None once nobody listens any more."""
    while number := reader.recv(1):
        if number[0] in SIGNALS:
            return number[0]
    return None
