"""The start of `tandem serve`: a few lines that are true."""

import json
import shlex
from itertools import pairwise

import httpx
import psutil

from tests.integration.conftest import KEY, Served
from tests.integration.tandem_serve import TandemServe


def test_a_good_start_is_a_few_lines(server: TandemServe) -> None:
    lines = server.wait_until_ready()
    assert len(lines) <= 13, lines


def test_the_printed_request_is_answered(server: TandemServe) -> None:
    line = next(line for line in server.wait_until_ready() if " curl " in line)
    answer = run_curl(line.replace("YOUR_KEY", KEY))
    assert answer["usage"]["completion_tokens"] == 64


def test_grpc_is_open_to_this_machine_alone(server: TandemServe, served: Served) -> None:
    line = next(line for line in server.wait_until_ready() if "gRPC" in line)
    assert int(line.rpartition(":")[2]) == served.grpc_port
    assert listening(served.grpc_port) == {"127.0.0.1"}


def test_the_metrics_are_where_it_says(server: TandemServe) -> None:
    line = next(line for line in server.wait_until_ready() if "  metrics " in line)
    metrics = httpx.get(line.split()[-1], timeout=60)
    assert metrics.status_code == 200
    assert "ray_" in metrics.text


def run_curl(line: str) -> dict[str, dict[str, int]]:
    """Send what the command in a line would send."""
    url, *options = shlex.split(line.partition(" curl ")[2])
    headers = [words for option, words in pairwise(options) if option == "-H"]
    body = options[options.index("-d") + 1]
    fields = dict(header.split(": ") for header in headers)
    response = httpx.post(url, content=body, headers=fields, timeout=120)
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
