"""`tandem serve`: check, start, say where to send requests, and end with the terminal's Ctrl-C."""

import logging
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext

from deployments.preflight import Preflight, check_start
from tandem.announcement import before_start, ready
from tandem.console import Console, WorkerLog
from tandem.forced_end import ended_by_force
from tandem.options import options_help, parse_words, wants_help
from tandem.server import Server
from tandem.signals import Stopped, stopped_by_signals
from workers.errors import TandemError

FAILED = 1
WATCH_S = 2.0


def serve(words: Sequence[str], console: Console | None = None) -> int:
    """Serve with the options that the words are, until a signal; returns the exit status.

    A start that fails ends with one sentence, which is the last line.
    """
    console = console or Console()
    if wants_help(words):
        console.say(options_help())
        return 0
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for name in ("ray", "ray.serve"):  # the second has a level of its own
        logging.getLogger(name).setLevel(logging.ERROR)
    console.say("checking the options and the models")
    try:
        with stopped_by_signals():
            return _serve(check_start(parse_words(words)), console)
    except TandemError as error:
        console.complain(str(error))
        return FAILED
    except Stopped as stopped:
        return stopped.status


def _serve(checked: Preflight, console: Console) -> int:
    for line in before_start(checked):
        console.say(line)
    log = WorkerLog(console)
    server = Server(checked.args, log)
    forced = ended_by_force(lambda: server.is_stopping) if server.owns_ray else nullcontext()
    with forced:
        _run(server, log, console)
    raise TandemError(
        "Ray has ended, and the server with it; session_latest/logs in Ray's folder (/tmp/ray, or "
        "ray in RAY_TMPDIR) says why"
    )


def _run(server: Server, log: WorkerLog, console: Console) -> None:
    """Start the server, and return when Ray has ended."""
    try:
        _start(server, log)
        assert server.target is not None
        for line in ready(server.args, server.target, server.start_s, server.metrics_address()):
            console.say(line)
        log.release()
        _watch(server, console)
    except Stopped:
        console.say("stopping")
        raise
    finally:
        log.silence()
        server.stop()


def _start(server: Server, log: WorkerLog) -> None:
    """Raises a TandemError with a sentence, whatever has gone wrong."""
    try:
        server.start()
    except TandemError:
        raise
    except ConnectionError as error:
        raise TandemError(f"Ray cannot be reached: {error}") from None
    except Exception as error:
        log.release()
        traceback.print_exc()
        raise TandemError(f"the server could not be started: {error!r}") from None


def _watch(server: Server, console: Console) -> None:
    """Wait until Ray ends; say when the kernels are compiled."""
    is_compiling = server.is_compiling()
    if is_compiling:
        console.say("compiling kernels in the background; requests are served meanwhile, slower")
    while server.is_alive():
        if is_compiling and not server.is_compiling():
            is_compiling = False
            console.say("kernels are compiled: from now on steps take their usual time")
        time.sleep(WATCH_S)
