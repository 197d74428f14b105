"""A process whose main thread hears no signal ends nevertheless."""

import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

PROGRAM = """
import ctypes, subprocess, sys, threading, time
from tandem.forced_end import ended_by_force
from tandem.signals import stopped_by_signals

def hold_up():
    "Wait for ever in C, where Python's handlers do not run."
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)

is_ending = False
with stopped_by_signals(), ended_by_force(lambda: is_ending, heard_s=0.5, ended_s=0.5):
    child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
    threading.Timer(0.3, lambda: print(child.pid, flush=True)).start()  # it waits by then
    try:
        {waiting}
    finally:
        is_ending = True
        {ending}
        print("in order", flush=True)
"""


def has_ended(process: psutil.Process, timeout_s: float = 30.0) -> bool:
    """Whether the process ends in time: one that was killed runs on for a moment.

    A zombie has ended: nobody may be there to ask for its exit status.
    """
    deadline = time.monotonic() + timeout_s
    with suppress(psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    return True


@pytest.mark.parametrize(
    ("waiting", "ending", "said"),
    [
        ("hold_up()", "pass", ""),
        ("time.sleep(600)", "hold_up()", ""),
        ("time.sleep(600)", "time.sleep(0.7)", "in order\n"),
    ],
    ids=["it hears nothing", "it does not end", "it ends in order"],
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process(
    waiting: str, ending: str, said: str, number: signal.Signals
) -> None:
    program = PROGRAM.format(waiting=waiting, ending=ending)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.send_signal(number)
        assert process.stdout.read() == said, process.stderr.read()
    if said:
        child.kill()
    else:
        assert process.returncode == 128 + number
        assert has_ended(child)
