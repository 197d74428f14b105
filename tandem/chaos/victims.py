"""The processes of a running app that may be struck."""

import os
import random
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.util.state import list_actors
from ray.util.state.exception import RayStateApiException

from tandem.chaos.events import WORKER_OF, Blow, Event, Struck, Victim
from workers.types import WorkerInfo

STATUS_TIMEOUT_S = 5.0
INFO_TIMEOUT_S = 60.0
DEPLOYMENTS = {"drafter": "DraftPool", "target": "TargetGroup"}


class Victims:
    """Finds and strikes the processes of an app that runs on this machine."""

    def __init__(self, app_name: str) -> None:
        self._handles: Mapping[str, Any] = {
            worker: serve.get_deployment_handle(deployment, app_name)
            for worker, deployment in DEPLOYMENTS.items()
        }
        self._router = serve.get_deployment_handle("Router", app_name)

    def strike(self, event: Event, *, rng: random.Random) -> Struck | None:
        """Kill or stop a victim of the event's kind; None if there is none."""
        pids = self._find(event.victim, rng)
        if not pids:
            return None
        for pid in pids:
            with suppress(ProcessLookupError):  # it has died with the ones before
                os.kill(pid, signal.SIGKILL if event.blow is Blow.KILL else signal.SIGSTOP)
        return Struck(event=event, pids=tuple(pids))

    def is_stopped(self, struck: Struck) -> bool:
        """Whether a process that was struck is there, and still stopped."""
        return any(map(_is_stopped, struck.pids))

    def resume(self, struck: Struck) -> bool:
        """Let what was stopped go on; returns whether it still was stopped."""
        stopped = [pid for pid in struck.pids if _is_stopped(pid)]
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        return bool(stopped)

    def target_info(self) -> WorkerInfo:
        """The info of a target."""
        info: WorkerInfo = self._handles["target"].info.remote().result(timeout_s=INFO_TIMEOUT_S)
        return info

    def replica(self, worker: str) -> str | None:
        """The id of some replica that answers."""
        status = _call(self._handles[worker].status)
        return None if status is None else str(status.replica_id)

    def held(self) -> int | None:
        """Sequences that the router and some worker of each kind hold; None if one is silent."""
        numbers = [_call(self._router.num_live)]
        for handle in self._handles.values():
            status = _call(handle.status)
            numbers.append(None if status is None else status.num_sequences)
        return None if None in numbers else sum(number or 0 for number in numbers)

    def _find(self, victim: Victim, rng: random.Random) -> Sequence[int]:
        if victim is Victim.PROXY:
            return _proxies()
        status = _call(self._handles[WORKER_OF[victim]].status)
        if status is None:
            return ()
        match victim:
            case Victim.DRAFT | Victim.RANK_0:
                return (status.pid,)
            case Victim.OTHER_RANK:
                return rng.sample(status.rank_pids, min(1, len(status.rank_pids)))
            case _:
                return (status.pid, *status.rank_pids)


def _call(method: Any) -> Any:
    """The answer of a deployment's method; None if there is none soon."""
    try:
        return method.remote().result(timeout_s=STATUS_TIMEOUT_S)
    except (RayError, RayServeException, TimeoutError):
        return None


def _proxies() -> Sequence[int]:
    alive: Any = [("class_name", "=", "ProxyActor"), ("state", "=", "ALIVE")]
    own = ray.get_runtime_context().gcs_address  # others may run a Ray of theirs on this machine
    try:
        actors = list_actors(address=own, filters=alive, timeout=10)
    except RayStateApiException:
        return ()
    return [actor.pid for actor in actors if actor.pid]


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
