"""`tandem serve` in a process of its own, as a person runs it, and its Ray, which tests join."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray._raylet import AuthenticationTokenLoader, Config

from tandem.live.server import joined_ray

LAST_LINE = "  Ctrl-C ends it"
START_TIMEOUT_S = 300
END_TIMEOUT_S = 60
METRICS_REPORT_MS = 1000
"""How late a metric may be; Ray's default is 10 s."""
CONTROL_LOOP_S = 0.5
"""How often Serve's controller looks around; its default of 0.1 s takes 7 % of a core."""
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_AUTO_CONNECT": "1",  # Ray's default
    "RAY_metrics_report_interval_ms": str(METRICS_REPORT_MS),
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": str(CONTROL_LOOP_S),
    # no processes in store for tasks: replicas are started one by one
    "RAY_prestart_worker_first_driver": "0",
    # of the usual priority, as are the tests that run meanwhile in the other process
    "RAY_worker_niceness": "0",
    # room for two groups of two ranks
    "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 4}),
}


class TandemServe:
    """A server that runs, and what it says."""

    def __init__(self, options: Mapping[str, Any], output: Path, *, token: str) -> None:
        """Start it; `output` is the file that takes what it says."""
        self.options = options
        words = [f"{name}={value}" for name, value in options.items()]
        self._output = output
        with output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tandem", "serve", *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, "RAY_AUTH_TOKEN": token},
            )

    def said(self) -> list[str]:
        """The lines so far."""
        return self._output.read_text().splitlines()

    def wait_until_ready(self) -> list[str]:
        """Returns the lines of its start."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while LAST_LINE not in (lines := self.said()):
            assert self.process.poll() is None, lines
            assert time.monotonic() < deadline, lines
            time.sleep(0.2)
        return lines[: lines.index(LAST_LINE) + 1]

    def family(self) -> list[psutil.Process]:
        """All processes that it has started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self) -> list[str]:
        """Ask it to end if it runs, and wait for that; returns what it says meanwhile."""
        num_lines = len(self.said())
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(END_TIMEOUT_S)
        return self.said()[num_lines:]


@contextmanager
def tandem_serve(options: Mapping[str, Any], output: Path) -> Iterator[TandemServe]:
    """A server that is ready, whose Ray this process has joined."""
    token = secrets.token_hex(32)
    server = TandemServe(options, output, token=token)
    try:
        server.wait_until_ready()
        with _token_of_ray(token), joined_ray(server.process.pid):
            yield server
    finally:
        server.stop()


@contextmanager
def _token_of_ray(token: str) -> Iterator[None]:
    """Let this process's Ray send a token; elsewhere in the tests it has none."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_AUTH_MODE", "token")
            patch.setenv("RAY_AUTH_TOKEN", token)
            _read_environment()
            yield
    finally:
        _read_environment()


def _read_environment() -> None:
    """Have Ray read anew what it has read when it was imported."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
