"""The processes of a running app that may be killed."""

import os
import random
import signal
from contextlib import suppress
from enum import StrEnum
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

STATUS_TIMEOUT_S = 5.0


class Victim(StrEnum):
    DRAFT = "draft"
    RANK_0 = "rank 0 of a target"
    OTHER_RANK = "another rank of a target"
    GROUP = "all ranks of a target"


class Victims:
    """Of an app whose workers run on this machine."""

    def __init__(self, app_name: str) -> None:
        self._targets = serve.get_deployment_handle("TargetGroup", app_name)
        self._drafts = serve.get_deployment_handle("DraftPool", app_name)

    def kill(self, victim: Victim, *, rng: random.Random) -> bool:
        """SIGKILL one of its kind; whether there was one alive."""
        pids = self._find(victim, rng)
        for pid in pids:
            with suppress(ProcessLookupError):  # it has died with the ones before
                os.kill(pid, signal.SIGKILL)
        return bool(pids)

    def _find(self, victim: Victim, rng: random.Random) -> list[int]:
        status = _status(self._drafts if victim is Victim.DRAFT else self._targets)
        if status is None:
            return []
        match victim:
            case Victim.DRAFT | Victim.RANK_0:
                return [status.pid]
            case Victim.OTHER_RANK:
                return rng.sample(status.rank_pids, min(1, len(status.rank_pids)))
            case Victim.GROUP:
                return [status.pid, *status.rank_pids]


def _status(handle: Any) -> Any:
    """The WorkerStatus of one that lives; None if none answers soon."""
    try:
        return handle.status.remote().result(timeout_s=STATUS_TIMEOUT_S)
    except (RayError, RayServeException, TimeoutError):
        return None
