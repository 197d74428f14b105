"""A live app: started as a user would start it, on free ports, and steered through Ray."""

import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import ray
from ray import serve
from ray._private.authentication.authentication_token_setup import (
    maybe_enable_token_auth_if_token_available,
)
from ray.serve.context import _get_global_client

from tandem.live.client import Endpoint, Load, LoadResult, run_closed
from tandem.live.counters import REPORT_MS, Counters, read_counters
from workers.errors import ConfigError

START_TIMEOUT_S = 600.0  # of models that load on a busy machine
IDLE_TIMEOUT_S = 30.0
POLL_S = 0.5


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class LiveServer:
    """An app that answers HTTP, and whose router can be told another gamma."""

    def __init__(
        self, endpoint: Endpoint, metrics_urls: Sequence[str] = (), *, grpc_port: int, pid: int
    ) -> None:
        """`pid` is the process that started the app, the parent of all of its own."""
        self.endpoint = endpoint
        self.grpc_address = f"127.0.0.1:{grpc_port}"
        self.pid = pid
        self._metrics_urls = metrics_urls
        self._router = serve.get_deployment_handle("Router", "default")

    def set_gamma(self, gamma: int | str) -> None:
        """Change the draft length of the running router; nothing restarts."""
        self._router.reconfigure.remote({"gamma": gamma}).result()

    def held(self) -> dict[str, int]:
        """What the app holds for its clients: only what is not 0."""
        held = {"live sequences": self._router.num_live.remote().result()}
        for deployment in ("TargetGroup", "DraftPool"):
            status = serve.get_deployment_handle(deployment, "default").status.remote().result()
            held[f"{deployment} sequences"] = status.num_sequences
            held[f"{deployment} blocks"] = status.num_used_blocks
        return {name: num for name, num in held.items() if num}

    def run(self, load: Load, *, concurrency: int) -> LoadResult:
        """Complete a load, and wait until the app is at rest; raises LoadError."""
        result = asyncio.run(run_closed(self.endpoint, load, concurrency=concurrency))
        self.wait_until_idle()
        return result

    def counters(self) -> Counters:
        """The app's counts, once Ray has heard of all of them."""
        time.sleep(2 * REPORT_MS / 1e3)
        return read_counters(self._metrics_urls)

    def wait_until_idle(self) -> None:
        """Wait until no completion runs: those whose clients hung up end a little later."""
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while self._router.num_live.remote().result() and time.monotonic() < deadline:
            time.sleep(POLL_S)


@contextmanager
def live_server(options: Mapping[str, str], log: Path) -> Iterator[LiveServer]:
    """Run `serve run deployments:app` with the options, on free ports, until the block ends."""
    http_port = free_port()
    grpc_port = free_port()
    arguments = {**options, "http_port": str(http_port), "grpc_port": str(grpc_port)}
    command = ["env", f"RAY_metrics_report_interval_ms={REPORT_MS}"]
    command += [str(Path(sys.executable).parent / "serve"), "run", "deployments:app"]
    command += [f"{name}={value}" for name, value in arguments.items()]
    log.parent.mkdir(parents=True, exist_ok=True)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # of its client in this process
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{http_port}"
        _wait_until_healthy(url, process, log)
        with joined_ray(process.pid):
            wait_until_compiled()
            endpoint = Endpoint(url=url, model=options["served_model_name"])
            yield LiveServer(endpoint, _metrics_urls(), grpc_port=grpc_port, pid=process.pid)
    finally:
        process.terminate()
        process.wait(timeout=60)


@contextmanager
def joined_ray(pid: int) -> Iterator[None]:
    """Have this process take part in the Ray that another one has started, until the block ends."""
    # as Ray does by itself for the address "auto" alone
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    ray.init(
        address=_ray_address(pid),
        namespace="serve",
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        yield
    finally:
        leave_ray()


def leave_ray() -> None:
    """Have this process take no part in a Ray any more; a second call does nothing."""
    if not ray.is_initialized():
        return
    # Where Serve scales the replicas, a thread of each handle tells it of calls. Without Ray it
    # would go on, and log a traceback each time.
    client = _get_global_client(raise_if_no_controller_running=False)
    for handle in [] if client is None else list(client.handle_cache.values()):
        handle.shutdown()
    ray.shutdown()


def _ray_address(pid: int) -> str:
    """Where the Ray listens that a process has started: others may run on the machine.

    "auto" where it has started none, as on a cluster.
    """
    for child in psutil.Process(pid).children(recursive=True):
        for word in child.cmdline():
            if child.name() == "raylet" and word.startswith("--gcs-address="):
                return word.partition("=")[2]
    return "auto"


def _metrics_urls() -> list[str]:
    """Where each node of Ray tells its metrics."""
    return [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in ray.nodes()
        if node["Alive"]
    ]


def wait_until_compiled() -> None:
    """Wait until forwards are compiled: until then steps are slower."""
    deployed = serve.status().applications["default"].deployments
    for deployment in ("TargetGroup", "DraftPool"):
        if deployment not in deployed:  # an app without a draft model
            continue
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
