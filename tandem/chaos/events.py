"""What may befall the processes of a running app, and in which order it does."""

import random
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum


class Victim(StrEnum):
    DRAFT = "a drafter"
    RANK_0 = "rank 0 of a target"
    OTHER_RANK = "another rank of a target"
    GROUP = "all ranks of a target"
    PROXY = "Serve's proxy"


class Blow(StrEnum):
    KILL = "killed"
    PAUSE = "stopped for a while"
    HANG = "stopped, and left to the watchdogs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    blow: Blow
    victim: Victim

    def __str__(self) -> str:
        return f"{self.victim} {self.blow}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """The processes that an event has befallen."""

    event: Event
    pids: tuple[int, ...]


WORKER_OF = {
    Victim.DRAFT: "drafter",
    Victim.RANK_0: "target",
    Victim.OTHER_RANK: "target",
    Victim.GROUP: "target",
}
"""The kind of worker that is lost with a victim."""
HANGING = (Victim.DRAFT, Victim.RANK_0, Victim.OTHER_RANK)


def kinds_of_events(*, num_ranks: int, blows: Collection[Blow] = tuple(Blow)) -> tuple[Event, ...]:
    """The events that an app with so many ranks in a target group can suffer by these blows."""
    kinds = [Event(blow=Blow.KILL, victim=victim) for victim in Victim]
    kinds += [
        Event(blow=blow, victim=victim) for blow in (Blow.PAUSE, Blow.HANG) for victim in HANGING
    ]
    return tuple(
        kind
        for kind in kinds
        if kind.blow in blows and (num_ranks > 1 or kind.victim is not Victim.OTHER_RANK)
    )


def draw_events(kinds: tuple[Event, ...], number: int, rng: random.Random) -> list[Event]:
    """So many events: rounds of one of each kind, each round in an order of its own."""
    events: list[Event] = []
    while len(events) < number:
        events += rng.sample(kinds, min(len(kinds), number - len(events)))
    return events
