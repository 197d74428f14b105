"""Who serves, as Serve's handles tell it."""

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import RayServeException

from deployments.transport import directory
from deployments.transport.directory import ServeDirectory
from deployments.transport.messages import ReplicaReport, StreamAddress
from workers.errors import WorkerLostError


def make_report(name: str) -> ReplicaReport:
    address = StreamAddress(replica_id=name, host="127.0.0.1", port=1, token="t")
    return ReplicaReport(address=address, num_cached_tokens=0)


class Handle:
    """A Serve handle: one answer for each replica, or an error instead of all of them."""

    def __init__(self, answers: list[Any] | Exception, one: Any = None) -> None:
        self.answers = answers
        self.one = one
        self.was_cancelled = False
        self.report = self

    def options(self, **_: Any) -> "Handle":
        return self

    def broadcast(self, method: str) -> "Handle":
        assert method == "report"
        return self

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert timeout_s > 0
        assert return_exceptions
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers

    def remote(self) -> "Handle":
        return self

    def cancel(self) -> None:
        self.was_cancelled = True

    def __await__(self) -> Any:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        if self.one is None:
            await asyncio.Event().wait()
        if isinstance(self.one, Exception):
            raise self.one
        return self.one


async def names(directory: ServeDirectory) -> set[str]:
    return {report.address.replica_id for report in await directory.replicas()}


async def test_all_that_answer_are_known() -> None:
    handle: Any = Handle([make_report("a"), ActorDiedError(), make_report("b")])
    listing = ServeDirectory(handle)
    assert await names(listing) == {"a", "b"}
    handle.answers = [make_report("b")]
    assert await names(listing) == {"b"}


async def test_one_that_hangs_hides_neither_the_known_nor_the_next_that_answers() -> None:
    handle: Any = Handle([make_report("a"), make_report("hangs")], one=make_report("new"))
    listing = ServeDirectory(handle)
    await listing.replicas()
    handle.answers = TimeoutError("not all have answered")
    assert await names(listing) == {"a", "hangs", "new"}


@pytest.mark.parametrize(
    "answers",
    [[], [ActorDiedError()], RayServeException("unavailable"), ConnectionResetError("reset")],
    ids=["none", "dead", "Serve", "network"],
)
async def test_that_nobody_answers_is_said(answers: Any) -> None:
    handle: Any = Handle(answers)
    with pytest.raises(WorkerLostError, match=r"no(ne of \d)? replicas? answers"):
        await ServeDirectory(handle).replicas()


async def test_a_call_that_is_not_answered_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "TIMEOUT_S", 0.01)
    handle: Any = Handle(TimeoutError("not all have answered"))
    with pytest.raises(WorkerLostError, match="no replica answers"):
        await ServeDirectory(handle).replicas()
    assert handle.was_cancelled
