"""Loads against a server that streams as the app does; nothing here is timed."""

import asyncio
import threading

import pytest

from tandem.bench.long_prompt import interfere
from tandem.live.client import (
    Endpoint,
    Load,
    LoadError,
    request_body,
    run_closed,
)
from tests.tandem.openai_server import KNOWN_FIELDS, WORDS, OpenAIServer, event


def endpoint_of(server: OpenAIServer) -> Endpoint:
    return Endpoint(url=server.url, model="first")


def make_load(num_prompts: int) -> Load:
    prompts = [f"prompt {index}" for index in range(num_prompts)]
    return Load(prompts=prompts, max_tokens=5, temperature=0.5)


def test_a_load_sent_again_finds_nothing_cached() -> None:
    endpoint = Endpoint(url="", model="m")
    load = make_load(2)
    first, second = (request_body(endpoint, each, 1) for each in (load, load.again()))
    assert first.keys() == KNOWN_FIELDS
    assert (first["prompt"], first["seed"]) == ("prompt 1", 1)
    assert first["cache_salt"] != second["cache_salt"]
    assert {**first, "cache_salt": ""} == {**second, "cache_salt": ""}


class TestClosedLoop:
    def test_so_many_run_at_a_time_to_the_end(self, server: OpenAIServer) -> None:
        server.together = threading.Barrier(2)  # passed by two at a time only
        result = asyncio.run(run_closed(endpoint_of(server), make_load(5), concurrency=2))
        assert server.most_at_a_time == 2
        assert result.texts == ("".join(WORDS),) * 5
        assert result.num_tokens == 5 * len(WORDS)
        assert len(result.time_to_first_s) == 5
        assert len(result.chunk_gaps_s) == 5 * (len(WORDS) - 1)
        all_s = sum(answer.ended_s - answer.started_s for answer in result.answers)
        assert all_s * result.tokens_per_s == pytest.approx(2 * 5 * len(WORDS))
        assert {request["seed"] for request in server.requests} == set(range(5))
        asked = [(request["prompt"], request["cache_salt"]) for request in server.requests]
        assert len(set(asked)) == len(asked)

    def test_streams_begin_with_requests_of_several_lengths_that_do_not_count(
        self, server: OpenAIServer
    ) -> None:
        server.together = threading.Barrier(4)  # so that the first four are of four streams
        result = asyncio.run(run_closed(endpoint_of(server), make_load(8), concurrency=4))
        assert sorted(request["max_tokens"] for request in server.requests[:4]) == [1, 2, 3, 5]
        assert {request["max_tokens"] for request in server.requests[4:]} == {5}
        counted = [request["seed"] for request in server.requests[4:12]]
        assert sorted(counted) == list(range(8))
        assert len(result.answers) == 8

    def test_one_stream_has_no_need_of_that(self, server: OpenAIServer) -> None:
        asyncio.run(run_closed(endpoint_of(server), make_load(3), concurrency=1))
        assert [request["seed"] for request in server.requests] == [0, 1, 2]

    def test_with_fewer_prompts_than_streams_all_have_something_to_do(
        self, server: OpenAIServer
    ) -> None:
        server.together = threading.Barrier(3)
        result = asyncio.run(run_closed(endpoint_of(server), make_load(1), concurrency=3))
        assert server.most_at_a_time == 3
        assert len(result.texts) == 1

    def test_a_further_request_that_fails_ends_it(self, server: OpenAIServer) -> None:
        server.refuses_every = 3
        server.endless_prompts = ("prompt 1",)
        with pytest.raises(LoadError, match="status 429"):
            asyncio.run(run_closed(endpoint_of(server), make_load(2), concurrency=2))

    def test_a_refusal_ends_it(self, server: OpenAIServer) -> None:
        server.refuses_every = 2
        with pytest.raises(LoadError, match=r"status 429: .*too many"):
            asyncio.run(run_closed(endpoint_of(server), make_load(2), concurrency=1))

    def test_a_failure_ends_the_other_requests_too(self, server: OpenAIServer) -> None:
        server.refuses_every = 3
        server.endless_prompts = ("prompt 0", "prompt 1")  # the third is refused

        async def fail() -> int:
            with pytest.raises(LoadError, match="status 429"):
                await run_closed(endpoint_of(server), make_load(12), concurrency=3)
            return len(asyncio.all_tasks())

        assert asyncio.run(fail()) == 1  # itself

    @pytest.mark.parametrize(
        "sent", ['{"error": {"message": "lost"}}', "what?", "[]", '{"choices": []}']
    )
    def test_what_is_no_event_is_shown(self, server: OpenAIServer, sent: str) -> None:
        server.events = (sent,)
        with pytest.raises(LoadError, match=r"lost|what\?|\[\]"):
            asyncio.run(run_closed(endpoint_of(server), make_load(1), concurrency=1))

    def test_usage_is_that_of_the_last_event(self, server: OpenAIServer) -> None:
        server.events = (
            event("a", 1), event("b", 4, num_accepted=2, num_drafted=5), event(None, 5),
        )  # fmt: skip
        result = asyncio.run(run_closed(endpoint_of(server), make_load(1), concurrency=1))
        assert (result.num_tokens, result.texts, len(result.chunk_gaps_s)) == (5, ("ab",), 1)
        (answer,) = result.answers
        assert [(e.usage.num_accepted, e.usage.num_drafted) for e in answer.events] == [
            (0, 0), (2, 5),
        ]  # fmt: skip

    def test_a_completion_may_be_empty(self, server: OpenAIServer) -> None:
        server.events = (event(None, 0),)
        result = asyncio.run(run_closed(endpoint_of(server), make_load(1), concurrency=1))
        assert (result.num_tokens, result.texts, result.time_to_first_s) == (0, ("",), ())

    def test_a_server_that_is_gone_is_named(self) -> None:
        endpoint = Endpoint(url="http://127.0.0.1:9", model="m")
        with pytest.raises(LoadError, match=r"127.0.0.1:9 broke off"):
            asyncio.run(run_closed(endpoint, make_load(1), concurrency=1))


class TestInterference:
    def test_streams_run_until_the_long_prompt_is_answered(self, server: OpenAIServer) -> None:
        server.endless_prompts = ("prompt 0", "prompt 1")
        long = Load(prompts=["long"], max_tokens=1, temperature=0.0)
        measured = asyncio.run(interfere(endpoint_of(server), make_load(2), long, alone_s=0.3))
        assert measured.began_s < measured.sent_s < measured.first_s
        assert [bool(chunks) for chunks in measured.chunks] == [True, True]
        assert measured.gaps_alone()
        assert measured.alone_tokens_per_s > 0
        assert server.requests[-1]["prompt"] == "long"

    def test_streams_that_end_before_it_measure_nothing(self, server: OpenAIServer) -> None:
        server.endless_prompts = ("prompt 0",)
        long = Load(prompts=["long"], max_tokens=1, temperature=0.0)
        with pytest.raises(LoadError, match="a stream came to the end"):
            asyncio.run(interfere(endpoint_of(server), make_load(2), long, alone_s=0.3))
