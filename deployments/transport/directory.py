"""The replicas of a deployment that serve now, found by asking over Serve's handles."""

import asyncio
from typing import Any, Protocol

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.transport.messages import ReplicaReport
from workers.errors import WorkerLostError

TIMEOUT_S = 5.0


class Directory(Protocol):
    """Knows the replicas of one kind of worker."""

    async def replicas(self) -> list[ReplicaReport]:
        """What each of them says of itself; raises WorkerLostError if none answers."""
        ...


class ServeDirectory:
    """The replicas of a Serve deployment, as far as it sends requests to them."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        # by value: a trip through the object store costs more
        self._handle = handle.options(_by_reference=False)
        self._known: dict[str, ReplicaReport] = {}

    async def replicas(self) -> list[ReplicaReport]:
        try:
            try:
                self._known = _by_id(await self._ask_all())
            except TimeoutError:  # a replica that hangs keeps back the answers of all
                self._known |= _by_id([await self._ask_one()])
        except (RayError, RayServeException, OSError, TimeoutError) as error:
            raise WorkerLostError(f"no replica answers: {error}") from error
        return list(self._known.values())

    async def _ask_all(self) -> list[ReplicaReport]:
        """The reports of all replicas that answer; raises WorkerLostError if none does."""
        answers: list[ReplicaReport | BaseException] = await self._handle.broadcast(
            "report"
        ).results_async(timeout_s=TIMEOUT_S, return_exceptions=True)
        reports = [answer for answer in answers if isinstance(answer, ReplicaReport)]
        if not reports:
            raise WorkerLostError(f"none of {len(answers)} replicas answers: {answers[-1:]}")
        return reports

    async def _ask_one(self) -> ReplicaReport:
        """The report of one replica, the one that Serve finds least busy."""
        response = self._handle.report.remote()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                report: ReplicaReport = await response
                return report
        finally:
            response.cancel()  # type: ignore[no-untyped-call]


def _by_id(reports: list[ReplicaReport]) -> dict[str, ReplicaReport]:
    return {report.address.replica_id: report for report in reports}
