"""What a chaos run counts, against a server in this process that is disturbed by no real kill."""

import asyncio
import json
from collections import Counter

from cluster.bench.client import Endpoint, Load
from cluster.chaos.run import ChaosOptions, ChaosReport, Kill, format_report, run_chaos
from cluster.chaos.victims import Victim
from tests.cluster.openai_server import OpenAIServer

NUM_KILLS = 8


def run(server: OpenAIServer, kill: Kill) -> ChaosReport:
    endpoint = Endpoint(url=server.url, model="first", is_ours=False)
    load = Load(prompts=("one", "two", "three"), max_tokens=5, temperature=0.5)
    options = ChaosOptions(
        num_requests=20, num_kills=NUM_KILLS, mean_pause_s=0.01, concurrency=4, seed=3
    )
    return asyncio.run(run_chaos(endpoint, load, kill, options))


def test_undisturbed_requests_are_neither_lost_nor_wrong(server: OpenAIServer) -> None:
    report = run(server, lambda _: True)
    assert report.is_good
    assert report.num_requests >= 20
    first_lines = [request["prompt"].splitlines()[0] for request in server.requests]
    # the load's, undisturbed and then disturbed; the others, that only keep up the load, differ
    (_, num_of_load), *_ = Counter(first_lines).most_common()
    assert num_of_load == report.num_requests + 3
    assert report.kills == Counter(dict.fromkeys(Victim, NUM_KILLS // len(Victim)))


def test_a_text_that_differs_is_wrong(server: OpenAIServer) -> None:
    def kill(_: Victim) -> bool:
        end = {"choices": [], "usage": {"completion_tokens": 1}}
        server.events = (json.dumps({"choices": [{"text": "x"}]}), json.dumps(end), "[DONE]")
        return True

    report = run(server, kill)
    assert not report.is_good
    assert set(report.wrong) == {"x"}
    assert "| wrong | " + str(len(report.wrong)) in format_report(report)


def test_a_request_that_fails_is_lost(server: OpenAIServer) -> None:
    def kill(_: Victim) -> bool:
        server.refuses_every = 2
        return True

    report = run(server, kill)
    assert not report.is_good
    assert "too many" in report.lost[0]
    assert not report.wrong


def test_a_kind_of_which_none_lives_gets_another_turn(server: OpenAIServer) -> None:
    asked: list[Victim] = []

    def kill(victim: Victim) -> bool:
        asked.append(victim)
        return victim is not Victim.DRAFT or asked.count(victim) > 3

    report = run(server, kill)
    assert report.kills[Victim.DRAFT] == NUM_KILLS // len(Victim)
    assert asked.count(Victim.DRAFT) == report.kills[Victim.DRAFT] + 3
