"""What `tandem load` asks, counts and judges, against a server that streams as the app does."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tandem.live.client import Endpoint, Load
from tandem.load.cancels import HeldError, Options, leave_over_http
from tandem.load.memory import MOST_GROWTH, ProcessMemory, make_memory, numbered
from tandem.load.quiet import Quiet, ask_quietly, ask_too_much
from tandem.load.report import (
    LONGEST_HELD_S,
    LONGEST_REFUSAL_S,
    MOST_SLOWDOWN,
    CancelResult,
    FloodResult,
    format_cancels,
    format_flood,
)
from tandem.load.streams import FloodReport, Streams, run_flood
from tests.tandem.openai_server import WORDS, OpenAIServer

TEXT = "".join(WORDS)
MIB = 2**20


def endpoint_of(server: OpenAIServer) -> Endpoint:
    return Endpoint(url=server.url, model="first", api_key="sk-1")


def make_load(*prompts: str) -> Load:
    return Load(prompts=prompts, max_tokens=5, temperature=0.0)


class TestQuietKey:
    def test_each_of_its_requests_finds_nothing_cached(self, server: OpenAIServer) -> None:
        quiet = Quiet()
        load = make_load("a", "b")
        asyncio.run(ask_quietly(endpoint_of(server), load, [TEXT, "other"], quiet, num=3))
        assert [request["prompt"] for request in server.requests] == ["a", "b", "a"]
        assert len({request["cache_salt"] for request in server.requests}) == 3
        assert len(quiet.first_tokens_s) == 3
        assert quiet.wrong == [TEXT]

    def test_errors_are_kept(self, server: OpenAIServer) -> None:
        server.refuses_every = 1
        quiet = Quiet()
        asyncio.run(ask_quietly(endpoint_of(server), make_load("a"), [TEXT], quiet, num=1))
        assert "status 429" in quiet.errors[0]
        assert quiet.first_tokens_s == []

    def test_refusals_are_timed_and_what_is_let_in_is_read(self, server: OpenAIServer) -> None:
        server.refuses_every = 2
        refusals_s: list[float] = []

        async def ask() -> None:
            task = asyncio.create_task(
                ask_too_much(endpoint_of(server), make_load("a"), refusals_s)
            )
            while not refusals_s:
                await asyncio.sleep(0.02)
            task.cancel()

        asyncio.run(asyncio.wait_for(ask(), 20))
        assert len(server.requests) >= 2


class TestFlood:
    STREAMS = Streams(num_streams=3, duration_s=0.3, hang_up_share=0.0, slow_share=0.0)

    def flood(self, server: OpenAIServer, expected: str = TEXT, **streams: Any) -> FloodReport:
        options = replace(self.STREAMS, **streams)
        return run_flood(endpoint_of(server), make_load("a"), [expected], options)

    def test_texts_are_compared(self, server: OpenAIServer) -> None:
        report = self.flood(server)
        assert report.num_right == len(server.requests) == len(report.first_tokens_s) >= 3
        assert (report.num_left, report.wrong, report.errors) == (0, [], [])
        assert len({request["cache_salt"] for request in server.requests}) == report.num_right

    def test_wrong_texts_are_kept(self, server: OpenAIServer) -> None:
        report = self.flood(server, "something else")
        assert report.num_right == 0
        assert set(report.wrong) == {TEXT}

    def test_some_are_left(self, server: OpenAIServer) -> None:
        server.endless_prompts = ("a",)
        report = self.flood(server, hang_up_share=1.0)
        assert report.num_left == len(server.requests)

    def test_refusals_and_errors_are_told_apart(self, server: OpenAIServer) -> None:
        server.refuses_every = 1
        assert len(self.flood(server).refusals_s) == 3  # which waited for a second then
        server.refuses_every = None
        server.breaks_off = 10**6
        report = self.flood(server)
        assert report.errors
        assert report.refusals_s == []


class TestCancels:
    OPTIONS = Options(cancels=5, at_once=2, stay_s=0.1)

    def leave(self, server: OpenAIServer, held: list[dict[str, int]]) -> CancelResult:
        def next_held() -> dict[str, int]:
            return held.pop(0) if len(held) > 1 else held[0]

        load = make_load("endless")
        server.endless_prompts = ("endless",)
        return asyncio.run(leave_over_http(endpoint_of(server), load, self.OPTIONS, next_held))

    def test_every_round_waits_until_nothing_is_held(self, server: OpenAIServer) -> None:
        held = [{"live sequences": 1}, {}, {}, {}]
        result = self.leave(server, held)
        assert len(server.requests) <= result.num_clients == 5
        assert len(result.until_free_s) == 3
        assert result.until_free_s[0] > result.until_free_s[1]

    def test_what_stays_for_good_is_an_error(
        self, server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tandem.load.cancels.TIMEOUT_S", 0.1)
        with pytest.raises(HeldError, match="after all clients have left, still held"):
            self.leave(server, [{"TargetGroup blocks": 3}])


class TestMemory:
    def test_moments_are_medians_of_an_eighth(self) -> None:
        readings = [100 * MIB, 900 * MIB, 100 * MIB, *[200 * MIB] * 18, *[210 * MIB] * 3]
        memory = make_memory("Router", readings)
        assert (memory.start, memory.quarter, memory.middle, memory.end) == (100, 200, 200, 210)
        assert memory.growth == pytest.approx(0.05)

    def test_one_reading_is_all_moments(self) -> None:
        memory = make_memory("Router", [3 * MIB])
        assert (memory.start, memory.quarter, memory.middle, memory.end) == (3, 3, 3, 3)

    def test_processes_of_one_name_are_numbered(self) -> None:
        assert numbered(["a", "b", "a"]) == ["a 1", "b", "a 2"]


def make_memory_of(name: str, growth: float) -> ProcessMemory:
    return ProcessMemory(name=name, start=10, quarter=100, middle=100, end=100 * (1 + growth))


GOOD = FloodResult(
    alone=Quiet(first_tokens_s=[0.1, 0.1]),
    beside=Quiet(first_tokens_s=[0.1 * MOST_SLOWDOWN, 0.01]),
    refusals_s=[LONGEST_REFUSAL_S] * 20,
    flood=FloodReport(num_right=7, num_left=2),
    memory=[make_memory_of("Router", MOST_GROWTH - 0.001)],
    held={},
)


def met(table: str) -> list[str]:
    """The last cells of the table of what is asked."""
    lines = table.split("\n\n")[0].splitlines()[2:]
    return [line.strip("| ").rpartition("| ")[2] for line in lines]


class TestReport:
    def test_all_may_be_met(self) -> None:
        table = format_flood(GOOD)
        assert met(table) == ["yes"] * 5
        assert "| Router | 10 | 100 | 100 | 105 | +4.9% |" in table

    @pytest.mark.parametrize(
        ("index", "worse"),
        [
            (0, {"flood": FloodReport(num_right=7, wrong=["x"])}),
            (0, {"flood": FloodReport(num_right=7, errors=["x"])}),
            (1, {"beside": Quiet(first_tokens_s=[0.1 * MOST_SLOWDOWN + 0.01])}),
            (1, {"beside": Quiet()}),
            (2, {"refusals_s": [LONGEST_REFUSAL_S * 1.1] * 20}),
            (2, {"refusals_s": []}),
            (3, {"memory": [make_memory_of("Router", MOST_GROWTH + 0.01)]}),
            (4, {"held": {"live sequences": 1}}),
        ],
    )
    def test_what_is_not_met_is_told(self, index: int, worse: dict[str, Any]) -> None:
        seen = met(format_flood(replace(GOOD, **worse)))
        assert [number for number, word in enumerate(seen) if word != "yes"] == [index]

    def test_cancels_are_judged_by_the_longest(self) -> None:
        result = CancelResult(
            protocol="gRPC", num_clients=4, num_unanswered=1, until_free_s=[0.1, LONGEST_HELD_S]
        )
        late = replace(result, until_free_s=[0.1, LONGEST_HELD_S + 0.1])
        assert met(format_cancels([result, late])) == ["yes", "**no**"]
