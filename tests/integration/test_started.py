"""`tandem serve` as a person runs it: a process of its own, from its first line to its end."""

import re
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from cluster.bench.server import free_port

START_TIMEOUT_S = 240
END_TIMEOUT_S = 60
LAST_LINE = "Ctrl-C ends it"


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, psutil.Process]]:
    """What it prints until it is ready, and the process."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    log = tmp_path / "log"
    ports = [f"{name}_port={free_port()}" for name in ("http", "grpc")]
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tandem", "serve", *ports, "compile=off"],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    yield log, process
    process.kill()
    process.wait()
