"""Ctrl-C and SIGTERM as one exception, so that a server ends in order."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """A signal has asked to end; not an Exception, so that nothing takes it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number
        """The exit status that shells expect."""


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Raise Stopped in the block when a signal arrives; of whatever kind Ray makes it, too."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    listen()
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(signal.SIGINT) from None
    except SystemExit:  # how Ray's own handler, which it sets while it starts, ends a process
        raise Stopped(signal.SIGTERM) from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def listen() -> None:
    """Raise Stopped in the main thread when a signal arrives."""
    for number in SIGNALS:
        signal.signal(number, _stop)


def ignore() -> None:
    """Let no further signal keep the process from ending in order."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise Stopped(number)
