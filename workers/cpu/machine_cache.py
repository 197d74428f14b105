"""Files that are compiled once per machine: where they lie, what they are called, and the lock by
which one process compiles them.

What is built is a file or a folder, named by its fingerprint. Beside it lies what each build has
left that was not finished, and a lock, which stays: whoever waits for it has opened that very file.
Code, torch and machines change, so what nobody has used for a month goes when anything is built.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import torch
from filelock import FileLock
from torch.utils import cpp_extension

MONTH_S = 30 * 24 * 3600.0
LOCK_SUFFIX = ".lock"


def get_or_build(name: str, sources: Iterable[str], build: Callable[[Path], None]) -> Path:
    """What `build` makes of the sources on this machine, made now if it is not there.

    It lies beside torch's own extensions. Whatever `build` raises is passed on.

    Args:
        sources: everything it depends on besides torch and the machine.
        build: writes a file or a folder to the path it is given.
    """
    folder = Path(cpp_extension.get_default_build_root()) / "tandem"
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / f"{name}-{_fingerprint(sources)}"
    with _lock_of(built):  # several workers may start together
        if not built.exists():
            for left in folder.glob(f"{built.name}.*"):  # by builders that were killed
                if left.suffix != LOCK_SUFFIX:
                    _delete(left)
            # a compiler outlives the worker that is killed: two must not write to one file
            unfinished = folder / f"{built.name}.{os.getpid()}"
            build(unfinished)
            unfinished.rename(built)
            _delete_unused(folder)
        os.utime(built)
    return built


def _lock_of(path: Path, timeout_s: float = -1) -> FileLock:
    """The lock of what is, or was to be, built; by default it is waited for."""
    return FileLock(path.with_name(path.name.partition(".")[0] + LOCK_SUFFIX), timeout=timeout_s)


def _delete_unused(folder: Path) -> None:
    """Delete what nobody has used for a month; what is being built or looked for now is in use."""
    for path in folder.iterdir():
        with suppress(OSError):  # another process has its lock, or has deleted it
            if path.suffix != LOCK_SUFFIX and _is_unused(path):
                with _lock_of(path, timeout_s=0):
                    if _is_unused(path):
                        _delete(path)


def _is_unused(path: Path) -> bool:
    return time.time() - path.stat().st_mtime > MONTH_S


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _fingerprint(sources: Iterable[str]) -> str:
    """A text that changes with sources, torch and kind of CPU: many machines may share a home."""
    cpu_info = Path("/proc/cpuinfo")
    text = cpu_info.read_text() if cpu_info.exists() else torch.backends.cpu.get_cpu_capability()
    cpu = [line for line in text.splitlines() if line.startswith(("flags", "Features", "model"))]
    parts = [*sources, torch.__version__, *sorted(set(cpu))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
