"""How long it takes until a lost worker's successor answers."""

from collections import deque

from tandem.chaos.events import Blow


class Restarts:
    """Matches workers that are new to those that were lost."""

    def __init__(self) -> None:
        self._known: dict[str, set[str]] = {}
        self._lost: dict[str, deque[tuple[Blow, float]]] = {}
        self.seconds: dict[str, list[float]] = {}
        """Seconds of each restart after a kill, by the worker's kind. Restarts after a hang are
        left out, since watchdogs take their own time."""

    def lost(self, worker: str, blow: Blow, at_s: float) -> None:
        if blow is not Blow.PAUSE:
            self._lost.setdefault(worker, deque()).append((blow, at_s))

    def answered(self, worker: str, replica: str, at_s: float) -> None:
        """A replica has answered; one that was never heard of is the successor of the one lost
        first, and of a killed one before one that hangs."""
        known = self._known.setdefault(worker, set())
        if replica in known:
            return
        known.add(replica)
        lost = self._lost.get(worker)
        if not lost:  # it is one of the first
            return
        first = next((entry for entry in lost if entry[0] is Blow.KILL), lost[0])
        lost.remove(first)
        if first[0] is Blow.KILL:
            self.seconds.setdefault(worker, []).append(at_s - first[1])
