"""Trials of grammars: each is compiled in a process of its own first, which ends where that takes
too long or too much memory.

The library has limits, but not for everything that compiling does, and it cannot be interrupted:
one grammar that it never finishes would cost a router a thread and its memory. So one process reads
the vocabulary and forks for each grammar. What the fork can compile, routers and workers can too.
"""

import json
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from workers.errors import InvalidRequestError, TandemError
from workers.grammar import Grammar
from workers.grammar_library import GrammarLibrary, refused

MAX_COMPUTING_S = 1.0
"""The most that compiling a grammar may compute; ordinary ones take some milliseconds."""
MAX_MEMORY_MB = 32
"""The most memory, in MiB, that compiling a grammar may take."""
STACK_MB = 1
"""The stack, in MiB, on which a grammar is compiled for trial: less than any thread has, on which
it is compiled then. The library follows rules within rules on its stack."""
ANSWER_TIMEOUT_S = 60.0
"""How long a trial may take, the start of the process with it, until that is taken to hang."""
NUM_TRIES = 3
"""How often a grammar is tried where the trial is lost, as to the system's killer."""
OUT_OF_MEMORY, FAILED = 3, 4
"""Exit codes of forks."""
PROGRAM = """import sys
sys.path[:] = sys.argv[2:]
from workers.grammar_trials import serve
serve(int(sys.argv[1]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """What one trial may take."""

    computing_s: float
    memory_mb: int

    def set(self) -> None:
        """Have this process ended where it takes more."""
        signal.setitimer(signal.ITIMER_PROF, self.computing_s)  # its signal ends a process
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(FileNotFoundError):  # not on Linux: by its time alone
            lines = Path("/proc/self/status").read_text().splitlines()
            taken = dict(line.split(":") for line in lines if line.endswith("kB"))
            for limit, name, more_mb in (
                (resource.RLIMIT_AS, "VmSize", self.memory_mb),
                (resource.RLIMIT_STACK, "VmStk", STACK_MB),
            ):
                most = int(taken[name].split()[0]) * 2**10 + more_mb * 2**20
                _, hard = resource.getrlimit(limit)
                if hard == resource.RLIM_INFINITY or most < hard:
                    resource.setrlimit(limit, (most, hard))

    def told(self, exit_code: int) -> str | None:
        """What a trial with such an end has met, in words; None where it was lost."""
        memory = f"compiling it takes more than {self.memory_mb} MiB"
        depth = "its rules are nested too deeply"
        return {
            -signal.SIGPROF: f"compiling it takes more than {self.computing_s:g} s",
            -signal.SIGABRT: memory,  # where the library gets no more
            OUT_OF_MEMORY: memory,
            -signal.SIGSEGV: depth,
            -signal.SIGBUS: depth,
            FAILED: "the library fails at it",
        }.get(exit_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    """How a trial ended."""

    exit_code: int
    function: str
    """The function whose arguments were compiled by themselves then; empty for the whole."""


class _Progress:
    """What a fork compiles, as the process that has made it sees it too."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._memory = mmap.mmap(-1, 2)

    def parts(self) -> Iterator[Grammar]:
        """The arguments of each function by themselves, so that one can be blamed, and the whole
        grammar."""
        for index, (_, arguments) in enumerate(self._grammar.functions(), start=1):
            self._note(index)
            yield arguments
        self._note(0)
        yield self._grammar

    @property
    def function(self) -> str:
        """See _Ending."""
        index = int.from_bytes(self._memory[:2], "little")
        return list(self._grammar.functions())[index - 1][0] if index else ""

    def _note(self, index: int) -> None:
        self._memory[:2] = index.to_bytes(2, "little")


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
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self._library = library
        self._limits = _Limits(computing_s=max_computing_s, memory_mb=max_memory_mb)
        self._answer_timeout_s = answer_timeout_s
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
        for _ in range(NUM_TRIES):
            process = self._running()
            ending = _ending(process.control, grammar, self._answer_timeout_s)
            if ending is None:
                self._forget(process)
            elif ending.exit_code == 0:
                return
            elif (reason := self._limits.told(ending.exit_code)) is not None:
                where = ending.function and f" (at the parameters of {ending.function!r})"
                raise refused(f"{reason}{where}; make it simpler")
        raise TandemError("grammars cannot be tried now; the server's log says more")

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


def _ending(control: socket.socket, grammar: Grammar, timeout_s: float) -> _Ending | None:
    """How a new trial of a grammar ended; None where it was lost."""
    ours, theirs = socket.socketpair()
    with ours, suppress(OSError):  # of a process that is gone, or hangs
        ours.settimeout(timeout_s)
        with theirs:
            socket.send_fds(control, [b"t"], [theirs.fileno()])
        ours.sendall(json.dumps(asdict(grammar)).encode())
        ours.shutdown(socket.SHUT_WR)
        if answer := ours.makefile("rb").read():
            return _Ending(**json.loads(answer))
    return None


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
        while fds := socket.recv_fds(control, 1, 1)[1]:
            with socket.socket(fileno=fds[0]) as trial:
                if os.fork() == 0:
                    control.close()
                    _in_fork(lambda: _watch(library, limits, trial))


def _watch(library: GrammarLibrary, limits: _Limits, trial: socket.socket) -> int:
    """Have the grammar that a socket brings compiled by a fork, and tell how that ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    progress = _Progress(Grammar(**json.loads(trial.makefile("rb").read())))
    fork = os.fork()
    if fork == 0:
        _in_fork(lambda: _try(library, limits, progress))
    exit_code = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
    ending = _Ending(exit_code=exit_code, function=progress.function if exit_code else "")
    trial.sendall(json.dumps(asdict(ending)).encode())
    return 0


def _try(library: GrammarLibrary, limits: _Limits, progress: _Progress) -> int:
    """The exit code of a fork, which may end at any time here."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # what it says is a client's
    limits.set()
    for part in progress.parts():
        try:
            library.compile(part)
        except MemoryError:
            return OUT_OF_MEMORY
        except Exception:  # of a wrong grammar: who compiles it next says what is wrong
            continue
    return 0


def _in_fork(work: Callable[[], int]) -> NoReturn:
    """Do the work of a process that was forked, and end with its exit code, whatever comes."""
    exit_code = FAILED
    try:
        exit_code = work()
    finally:
        os._exit(exit_code)
