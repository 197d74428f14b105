"""Files that are compiled once per machine: where they lie, what they are called, and the lock by
which one process compiles them."""

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from filelock import FileLock
from torch.utils import cpp_extension


def get_or_build(
    name: str, suffix: str, sources: Iterable[str], build: Callable[[Path], None]
) -> Path:
    """The file that `build` makes of the sources on this machine, made now if it is not there.

    It lies beside torch's own extensions. Whatever `build` raises is passed on.

    Args:
        sources: everything the file depends on besides torch and the machine.
        build: writes the file to the path it is given.
    """
    folder = Path(cpp_extension.get_default_build_root()) / "tandem"
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / f"{name}-{_fingerprint(sources)}{suffix}"
    with FileLock(built.with_suffix(".lock")):  # several workers may start together
        if not built.exists():
            # a compiler outlives the worker that is killed: two must not write to one file
            unfinished = built.with_name(f"unfinished-{os.getpid()}-{built.name}")
            build(unfinished)
            unfinished.rename(built)
    return built


def _fingerprint(sources: Iterable[str]) -> str:
    """A text that changes with sources, torch and kind of CPU: many machines may share a home."""
    cpu_info = Path("/proc/cpuinfo")
    text = cpu_info.read_text() if cpu_info.exists() else torch.backends.cpu.get_cpu_capability()
    cpu = [line for line in text.splitlines() if line.startswith(("flags", "Features", "model"))]
    parts = [*sources, torch.__version__, *sorted(set(cpu))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
