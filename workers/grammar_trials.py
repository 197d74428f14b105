"""Trials of grammars: each is compiled in a process of its own first, which ends where that takes
too long or too much memory.

The library has limits, but not for everything that compiling does, and it cannot be interrupted:
one grammar that it never finishes would cost a router a thread and its memory. So one process reads
the vocabulary and forks for each grammar. What the fork can compile, routers and workers can too.
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from workers.errors import InvalidRequestError, TandemError
from workers.grammar import Grammar
from workers.grammar_library import GrammarLibrary, refused

MAX_COMPUTING_S = 1.0
"""The most that compiling a grammar may compute; ordinary ones take some milliseconds."""
MAX_MEMORY_MB = 32
"""The most memory, in MiB, that compiling a grammar may take."""
PROGRAM = """import sys
sys.path[:] = sys.argv[2:]
from workers.grammar_trials import serve
serve(int(sys.argv[1]))
"""
BEGUN, ENDED = b"b", b"e"
"""What a trial says when it begins, and when it has come to an end, be the grammar right or not."""
NUM_STARTS = 2
"""How often a grammar is tried where the process ends that forks, as the system's killer may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """What one trial may take."""

    computing_s: float
    memory_mb: int

    def __str__(self) -> str:
        return f"{self.computing_s:g} s or {self.memory_mb} MiB"

    def set(self) -> None:
        """Have this process ended where it takes more."""
        signal.setitimer(signal.ITIMER_PROF, self.computing_s)  # its signal ends a process
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(FileNotFoundError):  # not on Linux: by its time alone
            num_pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = num_pages * resource.getpagesize() + self.memory_mb * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (most, most))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """The process that forks, and the socket by which it is handed a socket for each trial."""

    process: "subprocess.Popen[bytes]"
    control: socket.socket

    def end(self) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait()


class GrammarTrials:
    """Tries grammars for one vocabulary. May be used by several threads at a time.

    Its process ends with it.
    """

    def __init__(
        self,
        library: GrammarLibrary,
        *,
        max_computing_s: float = MAX_COMPUTING_S,
        max_memory_mb: int = MAX_MEMORY_MB,
    ) -> None:
        self._library = library
        self._limits = _Limits(computing_s=max_computing_s, memory_mb=max_memory_mb)
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def start(self) -> None:
        """Start the process, unless it runs, and read the vocabulary here as well.

        Raises InvalidRequestError if no token's bytes are known.
        """
        self._running()
        self._library.load()

    @property
    def pid(self) -> int:
        """The process that forks."""
        return self._running().process.pid

    def run(self, grammar: Grammar) -> None:
        """Wait until a grammar was compiled for trial, whatever came of it.

        Raises InvalidRequestError if that takes too much, or if no token's bytes are known, and
        TandemError if it cannot be tried.
        """
        self._library.load()
        for _ in range(NUM_STARTS):
            process = self._running()
            match _answer(process.control, grammar):
                case b"":
                    self._forget(process)
                case answer if answer == BEGUN + ENDED:
                    return
                case _:
                    raise refused(f"compiling it takes more than {self._limits}; make it simpler")
        raise TandemError("grammars cannot be tried; the server's log says more")

    def _running(self) -> _Process:
        with self._lock:
            if self._process is None:
                self._process = _start(self._library, self._limits)
                weakref.finalize(self, self._process.end)
            return self._process

    def _forget(self, process: _Process) -> None:
        """Have another one started for the next trial."""
        with self._lock:
            if self._process is process:
                self._process = None
        process.end()


def _start(library: GrammarLibrary, limits: _Limits) -> _Process:
    described = {
        "limits": asdict(limits),
        "tokenizer": library.tokenizer_text(),
        "vocab_size": library.vocab_size,
        "end_tokens": library.end_tokens,
    }
    control, theirs = socket.socketpair()
    with theirs, tempfile.TemporaryFile() as vocabulary:
        vocabulary.write(json.dumps(described).encode())
        vocabulary.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(theirs.fileno()), *sys.path],
            stdin=vocabulary,
            pass_fds=[theirs.fileno()],
        )
    return _Process(process=process, control=control)


def _answer(control: socket.socket, grammar: Grammar) -> bytes:
    """What a new trial says of a grammar; nothing where no process began it."""
    ours, theirs = socket.socketpair()
    with ours, suppress(OSError):  # of a process that is gone
        with theirs:
            socket.send_fds(control, [BEGUN], [theirs.fileno()])
        ours.sendall(json.dumps(asdict(grammar)).encode())
        ours.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: ours.recv(len(BEGUN + ENDED)), b""))
    return b""


def serve(control_fd: int) -> None:
    """Fork for each socket that comes, until the owner's end of the control socket is closed."""
    from tokenizers import Tokenizer

    described = json.load(sys.stdin)
    limits = _Limits(**described.pop("limits"))
    tokenizer = described.pop("tokenizer")
    library = GrammarLibrary(lambda: Tokenizer.from_str(tokenizer), **described)
    with suppress(InvalidRequestError):  # the owner reads it too
        library.load()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the owner ends, and this then
    with socket.socket(fileno=control_fd) as control:
        while fds := socket.recv_fds(control, len(BEGUN), 1)[1]:
            with socket.socket(fileno=fds[0]) as trial:
                if os.fork() == 0:
                    control.close()
                    try:
                        _try(library, limits, trial)
                    finally:
                        os._exit(0)


def _try(library: GrammarLibrary, limits: _Limits, trial: socket.socket) -> None:
    """Compile the grammar that a socket brings. The process may end at any time here."""
    trial.sendall(BEGUN)
    grammar = Grammar(**json.loads(trial.makefile("rb").read()))
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # what it says is a client's
    limits.set()
    try:
        library.compile(grammar)
    except MemoryError:
        raise
    except Exception:  # of a wrong grammar: who compiles it next says what is wrong
        pass
    trial.sendall(ENDED)
