"""The live app a benchmark runs against: started by it as a user would, and steered through Ray."""

import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve

from tandem.bench.client import Endpoint
from workers.errors import ConfigError

START_TIMEOUT_S = 600.0  # of models that load on a busy machine
IDLE_TIMEOUT_S = 30.0
POLL_S = 0.5


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class LiveServer:
    """An app that answers HTTP, and whose router can be told another gamma."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._router = serve.get_deployment_handle("Router", "default")

    def set_gamma(self, gamma: int | str) -> None:
        """Change the draft length of the running router; nothing restarts."""
        self._router.reconfigure.remote({"gamma": gamma}).result()

    def take_statistics(self) -> Any:
        """The router's RoundStatistics since the last call."""
        return self._router.take_statistics.remote().result()

    def wait_until_idle(self) -> None:
        """See Server."""
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while self._router.num_live.remote().result() and time.monotonic() < deadline:
            time.sleep(POLL_S)


@contextmanager
def live_server(options: Mapping[str, str], log: Path) -> Iterator[LiveServer]:
    """Run `serve run deployments:app` with the options, on free ports, until the block ends."""
    http_port = free_port()
    arguments = {**options, "http_port": str(http_port), "grpc_port": str(free_port())}
    command = [str(Path(sys.executable).parent / "serve"), "run", "deployments:app"]
    command += [f"{name}={value}" for name, value in arguments.items()]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{http_port}"
        _wait_until_healthy(url, process, log)
        ray.init(
            address="auto", namespace="serve", log_to_driver=False, logging_level=logging.ERROR
        )
        _wait_until_compiled()
        yield LiveServer(Endpoint(url=url, model=options["served_model_name"], is_ours=True))
    finally:
        ray.shutdown()
        process.terminate()
        process.wait(timeout=60)


def _wait_until_compiled() -> None:
    """Until then steps are slower, and the compiler takes from them."""
    for deployment in ("TargetGroup", "DraftPool"):
        worker = serve.get_deployment_handle(deployment, "default")
        while worker.status.remote().result().is_compiling:
            time.sleep(POLL_S)


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ConfigError(f"the server ended while it started; {log} says why")
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(POLL_S)
    raise ConfigError(
        f"the server did not answer within {START_TIMEOUT_S:.0f} s; {log} says what it does"
    )
