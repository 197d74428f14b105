"""`tandem serve` as a person runs it: a process of its own, from its first line to its end.

The app has no drafters, which is tested too.
"""

import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tandem.live.server import free_port

END_TIMEOUT_S = 60
LAST_LINE = "  Ctrl-C ends it\n"


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    # not in this process's own environment: a Ray that runs in it would lose its cluster
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    ports = [f"http_port={free_port()}", f"grpc_port={free_port()}"]
    options = [*ports, "compile=off", "drafter=none"]
    with subprocess.Popen(
        [sys.executable, "-m", "tandem", "serve", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **token},
    ) as started:
        yield started
        started.kill()  # if a test has failed; Ray's processes end with it


def read_until_ready(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line == LAST_LINE:
            break
    return lines


def test_a_good_start_is_a_few_lines_that_are_true_and_ends_with_a_signal(
    process: subprocess.Popen[str],
) -> None:
    lines = read_until_ready(process)
    assert lines[-1:] == [LAST_LINE], lines
    assert len(lines) <= 12, lines
    answer = run_curl(next(line for line in lines if " curl " in line))
    assert answer["usage"]["completion_tokens"] == 64
    grpc = next(line.split()[-1] for line in lines if "gRPC" in line)
    assert listening(int(grpc.rpartition(":")[2])) == {"127.0.0.1"}

    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) > 5
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=END_TIMEOUT_S)
    assert process.returncode == 128 + signal.SIGTERM
    # a crowded machine may have made Ray complain meanwhile
    assert rest.splitlines()[-1] == "stopping"
    assert "infinite retries" not in rest
    _, alive = psutil.wait_procs(family, timeout=END_TIMEOUT_S)
    assert alive == []


def run_curl(line: str) -> dict[str, dict[str, int]]:
    """Send what the command in a line would send."""
    url, *options = shlex.split(line.partition(" curl ")[2])
    name, value = options[options.index("-H") + 1].split(": ")
    body = options[options.index("-d") + 1]
    response = httpx.post(url, content=body, headers={name: value}, timeout=120)
    assert response.status_code == 200, response.text
    answer: dict[str, dict[str, int]] = json.loads(response.text)
    return answer


def listening(port: int) -> set[str]:
    """The addresses that a port is open on, of whatever process of ours."""
    return {
        connection.laddr.ip.removeprefix("::ffff:")
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }
