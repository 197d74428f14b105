"""A server of the app: Ray, Serve and the deployments, from start to end."""

import logging
import time
from typing import Any

import psutil
import ray
from ray import serve as ray_serve
from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from deployments.args import AppArgs
from deployments.builder import build, start_serve
from deployments.preflight import starts_ray
from tandem import signals
from tandem.console import WorkerLog
from tandem.failures import find_failure
from workers.errors import ConfigError, TandemError
from workers.types import WorkerInfo

APP = "default"
POLL_S = 0.5
CALL_TIMEOUT_S = 30.0
END_TIMEOUT_S = 5.0


class Server:
    """Runs the app on a Ray of its own, or on the cluster that it finds."""

    def __init__(self, args: AppArgs, log: WorkerLog) -> None:
        self.args = args
        self._log = log
        self.owns_ray = starts_ray()
        """Whether Ray's processes are of this one."""
        self.is_stopping = False
        """Whether `stop` has begun."""
        self._owns_serve = True
        self._processes: set[psutil.Process] = set()
        """Processes that belong to our Ray, whoever started them there."""
        self.start_s = 0.0
        """Seconds that the start took."""
        self.target: WorkerInfo | None = None
        """One replica of the target, once the server has started."""

    def start(self) -> None:
        """Returns when the app is ready; raises TandemError with a sentence if it cannot be."""
        began = time.monotonic()
        ray.init(namespace="serve", logging_level=logging.ERROR, log_to_driver=True)
        signals.listen()  # Ray has set its own handlers
        dispatcher.remove_handler("ray_print_logs")
        dispatcher.add_handler("tandem", self._log.receive)
        self._owns_serve = self.owns_ray or not ray_serve.status().proxies
        start_serve(self.args)
        target = ray_serve.RunTarget(build(self.args), name=APP)
        ray_serve.run_many([target], wait_for_applications_running=False)
        self._wait_until_running()
        self.target = self._ask("TargetGroup", "info")
        self.start_s = time.monotonic() - began

    def _wait_until_running(self) -> None:
        while True:
            app = ray_serve.status().applications[APP]
            if app.status is ApplicationStatus.RUNNING:
                return
            messages = [deployment.message for deployment in app.deployments.values()]
            failure = find_failure([*messages, app.message])
            if failure is not None and failure.is_final:
                raise ConfigError(failure.sentence)
            if app.status is ApplicationStatus.DEPLOY_FAILED:
                self._log.release()
                raise TandemError(failure.sentence if failure else _last_line(app.message))
            time.sleep(POLL_S)

    def is_compiling(self) -> bool:
        """Whether a worker, one of each kind, compiles its forward beside its steps.

        Of workers that do not answer, as they are being replaced, it is not known yet.
        """
        kinds = ["TargetGroup"] if self.args.draft_model is None else ["TargetGroup", "DraftPool"]
        try:
            return any(self._ask(kind, "status").is_compiling for kind in kinds)
        except (RayError, RayServeException, TimeoutError):
            return True

    def _ask(self, deployment: str, method: str) -> Any:
        handle = getattr(ray_serve.get_deployment_handle(deployment, APP), method)
        try:
            return handle.remote().result(timeout_s=CALL_TIMEOUT_S)
        finally:
            # where Serve scales the replicas, a thread of the handle would tell it of calls, and
            # start another Ray to do so once this one has ended
            handle.shutdown()

    def metrics_address(self) -> str | None:
        """Where Ray exports the metrics of this node, as Prometheus reads them; None if Ray does
        not say."""
        node_id = ray.get_runtime_context().get_node_id()
        for node in ray.nodes():
            if node["NodeID"] == node_id and node["MetricsExportPort"] > 0:
                return f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
        return None

    def is_alive(self) -> bool:
        """Whether the Ray that this process has started still runs."""
        children = psutil.Process().children()
        self._processes.update(psutil.Process().children(recursive=True))
        return not self.owns_ray or any(child.name() == "raylet" for child in children)

    def stop(self) -> None:
        """End what was started; on a cluster of others, the app alone ends."""
        self.is_stopping = True
        signals.ignore()
        if not ray.is_initialized():
            return
        if not self.owns_ray:
            self._leave()
        self.is_alive()  # notes the processes
        ray.shutdown()
        if self.owns_ray:
            # the id of one that ended long ago may be that of a thread by now
            running = [process for process in self._processes if process.is_running()]
            _, alive = psutil.wait_procs(running, timeout=END_TIMEOUT_S)
            for process in alive:
                process.kill()

    def _leave(self) -> None:
        """Have a cluster's Serve take the app down, or itself; it goes on once we have left.

        `serve.shutdown()` would wait for what runs, and then Ray complains that the controller has
        died.
        """
        client = _get_global_client(raise_if_no_controller_running=False)
        if client is None:
            return
        if self._owns_serve:
            ray.get(client._controller.graceful_shutdown.remote(wait=False))
        else:
            ray.get(client._controller.delete_apps.remote([APP]))


def _last_line(message: str) -> str:
    lines = message.strip().splitlines()
    return lines[-1] if lines else "the app could not be started"
