"""What a chaos run counts, against a server in this process that is disturbed by no real event."""

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import pytest

from tandem.chaos.events import Blow, Event, Struck, Victim, draw_events, kinds_of_events
from tandem.chaos.outage import Outage
from tandem.chaos.poison import Poison, make_poisons, send_poison
from tandem.chaos.report import ChaosReport, format_report
from tandem.chaos.restarts import Restarts
from tandem.chaos.run import ChaosOptions, run_chaos
from tandem.live.client import Endpoint, Load
from tests.tandem.openai_server import OpenAIServer, event

KINDS = kinds_of_events(num_ranks=2)
NUM_EVENTS = 2 * len(KINDS)
KILLED_PROXY = Event(blow=Blow.KILL, victim=Victim.PROXY)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_S", "RESEND_AFTER_S"):
        monkeypatch.setattr(f"tandem.chaos.run.{name}", 0.01)


@dataclass
class Unhurt:
    """Processes that nothing happens to, but what a test makes of a strike."""

    on_strike: Callable[[Event], bool] = lambda _: True
    ends_by_itself: bool = True
    num_held: int | None = 0
    stopped: set[int] = field(default_factory=set)
    resumed: list[Event] = field(default_factory=list)
    num_replicas: int = 1
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def strike(self, event: Event, *, rng: random.Random) -> Struck | None:
        if not self.on_strike(event):
            return None
        self.num_replicas += 1
        struck = Struck(event=event, pids=(rng.getrandbits(32),))
        if event.blow is not Blow.KILL:
            self.stopped.update(struck.pids)
        return struck

    def is_stopped(self, struck: Struck) -> bool:
        if struck.event.blow is Blow.HANG and self.ends_by_itself:
            self.stopped -= {*struck.pids}
        return bool(self.stopped & {*struck.pids})

    def resume(self, struck: Struck) -> bool:
        was_stopped = bool(self.stopped & {*struck.pids})
        self.stopped -= {*struck.pids}
        self.resumed += [struck.event] * was_stopped
        return was_stopped

    def replica(self, worker: str) -> str | None:
        return f"{worker}-{self.num_replicas}"

    def held(self) -> int | None:
        return self.num_held


def run(
    server: OpenAIServer,
    processes: Unhurt,
    *,
    num_events: int = NUM_EVENTS,
    poisons: tuple[Poison, ...] = (),
    kinds: tuple[Event, ...] = KINDS,
    num_requests: int = 20,
) -> ChaosReport:
    endpoint = Endpoint(url=server.url, model="first")
    load = Load(prompts=("one", "two", "three"), max_tokens=5, temperature=0.5)
    options = ChaosOptions(
        num_requests=num_requests,
        num_events=num_events,
        mean_pause_s=0.01,
        concurrency=4,
        kinds=kinds,
        poisons=poisons,
        poison_pause_s=0.01,
        stop_s=0.05,
        watchdog_s=0.2,
        seed=3,
    )
    return asyncio.run(run_chaos(endpoint, load, processes, options))


def test_undisturbed_requests_are_neither_lost_nor_wrong(server: OpenAIServer) -> None:
    processes = Unhurt()
    report = run(server, processes)
    assert report.is_good
    assert report.num_requests >= 20
    salts = [request["cache_salt"] for request in server.requests]
    # the load's, undisturbed and then disturbed; the others, that only keep up the load, differ
    (_, num_of_load), *_ = Counter(salts).most_common()
    assert num_of_load == report.num_requests + 3
    assert report.events == Counter(dict.fromkeys(KINDS, 2))
    assert report.restarts_s.keys() == {"drafter", "target"}


def test_what_is_stopped_goes_on_or_is_left_to_the_watchdogs(server: OpenAIServer) -> None:
    processes = Unhurt()
    report = run(server, processes)
    assert {event.blow for event in processes.resumed} == {Blow.PAUSE}
    assert (processes.stopped, report.num_unnoticed) == (set(), 0)
    processes = Unhurt(ends_by_itself=False)
    report = run(server, processes)
    num_left = sum(n for event, n in report.events.items() if event.blow is Blow.HANG)
    assert (processes.stopped, report.num_unnoticed) == (set(), num_left)
    assert f"| stopped, and noticed by no watchdog | {num_left} |" in format_report(report)


def test_a_text_that_differs_is_wrong(server: OpenAIServer) -> None:
    def strike(_: Event) -> bool:
        server.events = (event("x", 1), event(None, 1), "[DONE]")
        return True

    report = run(server, Unhurt(on_strike=strike))
    assert not report.is_good
    assert set(report.wrong) == {"x"}
    assert "| wrong | " + str(len(report.wrong)) in format_report(report)


def test_a_request_that_fails_is_lost(server: OpenAIServer) -> None:
    def strike(_: Event) -> bool:
        server.refuses_every = 2
        return True

    report = run(server, Unhurt(on_strike=strike))
    assert not report.is_good
    assert "too many" in report.lost[0]
    assert not report.wrong
    assert "lost: " in format_report(report)


def test_what_is_held_at_the_end_is_not_good(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.chaos.run.REST_TIMEOUT_S", 0.05)
    for held, word in ((3, "3"), (None, "not known")):
        report = run(server, Unhurt(num_held=held), num_events=1)
        assert not report.is_good
        assert f"| held at the end | {word} |" in format_report(report)


def test_a_kind_of_which_none_is_there_gets_another_turn(server: OpenAIServer) -> None:
    asked: list[Event] = []

    def strike(event: Event) -> bool:
        asked.append(event)
        return event.victim is not Victim.PROXY or asked.count(event) > 3

    report = run(server, Unhurt(on_strike=strike))
    assert report.events[KILLED_PROXY] == 2
    assert asked.count(KILLED_PROXY) == 5


@pytest.mark.parametrize(("victim", "is_resent"), [(Victim.PROXY, True), (Victim.DRAFT, False)])
def test_only_what_a_proxy_took_with_it_is_sent_again(
    victim: Victim, is_resent: bool, server: OpenAIServer
) -> None:
    def strike(_: Event) -> bool:
        server.breaks_off = 6
        return True

    kinds = (Event(blow=Blow.KILL, victim=victim),)
    report = run(server, Unhurt(on_strike=strike), num_events=1, kinds=kinds, num_requests=200)
    assert bool(report.lost) is not is_resent
    assert (report.num_resent > 0) is is_resent
    assert report.is_good is is_resent
    assert f"resent, then right | {report.num_resent} |" in format_report(report)


def test_poison_may_be_refused_but_not_fail(server: OpenAIServer) -> None:
    body = json.dumps({"model": "m", "prompt": "p", "seed": 1}).encode()
    poisons = (
        Poison(name="well", body=body),
        Poison(name="unknown field", body=body[:-1] + b', "zzz": 1}'),
        Poison(name="left", body=body, hang_up_s=1e-9),
    )
    report = run(server, Unhurt(), poisons=poisons)
    assert report.is_good
    assert report.num_poison >= 3
    server.status_of_unknown_fields = 500
    report = run(server, Unhurt(), poisons=poisons)
    assert not report.is_good
    assert {failure.split(":")[0] for failure in report.poison_failures} == {"unknown field"}
    assert "poison: unknown field: 500" in format_report(report)


async def test_every_poison_is_sent_as_bytes(server: OpenAIServer) -> None:
    poisons = make_poisons("m", vocab_size=97, max_model_len=64)
    assert len({poison.name for poison in poisons}) == len(poisons)
    bodies = {poison.name: poison.body for poison in poisons}
    assert json.loads(bodies["the highest seed, twice"])["seed"] == 2**63 - 1
    assert len(json.loads(bodies["a huge prompt"])["prompt"]) == 2_000_000
    assert len(json.loads(bodies["a prompt as long as the context"])["prompt"]) == 56
    with pytest.raises(json.JSONDecodeError):
        json.loads(bodies["no JSON"])
    async with httpx.AsyncClient(base_url=server.url) as client:
        unknown = next(poison for poison in poisons if poison.name == "an unknown field")
        got = await send_poison(client, unknown)
        assert (got.status, got.is_right) == (400, True)


def test_kinds_of_events_are_those_that_can_be() -> None:
    assert len(KINDS) == 11
    assert Victim.OTHER_RANK not in {kind.victim for kind in kinds_of_events(num_ranks=1)}
    kills = kinds_of_events(num_ranks=2, blows=[Blow.KILL])
    assert {kind.victim for kind in kills} == {*Victim}
    drawn = draw_events(KINDS, 25, random.Random(1))
    assert drawn == draw_events(KINDS, 25, random.Random(1))
    counts = Counter(drawn)
    assert counts.keys() == {*KINDS}
    assert {*counts.values()} == {2, 3}


def test_restarts_count_from_a_kill_to_a_new_replica() -> None:
    restarts = Restarts()
    restarts.answered("target", "a", 1.0)
    restarts.answered("target", "b", 1.0)
    restarts.lost("target", Blow.HANG, 2.0)
    restarts.lost("target", Blow.PAUSE, 2.5)
    restarts.lost("target", Blow.KILL, 3.0)
    restarts.answered("target", "b", 4.0)
    restarts.answered("target", "c", 10.0)  # of the killed one; the watchdogs take longer
    restarts.answered("target", "d", 100.0)
    assert restarts.seconds == {"target": [7.0]}


def test_an_outage_explains_what_broke_off_until_a_later_request_is_answered() -> None:
    outage = Outage(longest_s=100.0)
    assert not outage.explains(sent_s=1.0, now_s=2.0)
    with outage.striking():
        assert outage.explains(sent_s=1.0, now_s=2.0)
    assert not outage.explains(sent_s=1.0, now_s=2.0)  # there was no proxy to be killed
    outage.begin(3.0)
    outage.answered(sent_s=2.5, now_s=4.0)  # by the one that is dead now
    assert outage.explains(sent_s=1.0, now_s=5.0)
    assert outage.explains(sent_s=6.0, now_s=7.0)
    outage.answered(sent_s=8.0, now_s=9.0)
    assert outage.explains(sent_s=8.5, now_s=10.0)
    assert not outage.explains(sent_s=9.5, now_s=10.0)
    outage.begin(11.0)
    assert not outage.explains(sent_s=50.0, now_s=112.0)
