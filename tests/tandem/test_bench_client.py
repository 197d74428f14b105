"""Loads against a server that speaks OpenAI's completions; nothing here is timed."""

import asyncio
import threading

import pytest

from tandem.bench.client import (
    Endpoint,
    Load,
    LoadError,
    request_body,
    run_closed,
    run_open,
)
from tandem.bench.long_prompt import interfere
from tandem.bench.remote import RemoteOptions, find_server
from tests.tandem.openai_server import OPENAI_FIELDS, WORDS, OpenAIServer
from workers.errors import ConfigError


def endpoint_of(server: OpenAIServer) -> Endpoint:
    return Endpoint(url=server.url, model="first", is_ours=False)


def make_load(num_prompts: int) -> Load:
    prompts = [f"prompt {index}" for index in range(num_prompts)]
    return Load(prompts=prompts, max_tokens=5, temperature=0.5)


class TestRequest:
    def test_another_server_is_sent_the_fields_of_openai_and_a_line_of_its_own(self) -> None:
        endpoint = Endpoint(url="", model="m", is_ours=False, with_ignore_eos=False)
        one, other = make_load(2), make_load(2)
        request = request_body(endpoint, one, 1)
        assert request.keys() == OPENAI_FIELDS
        assert request["seed"] == 1
        assert request["prompt"].endswith("\nprompt 1")
        assert request["prompt"] != request_body(endpoint, other, 1)["prompt"]
        asked_on = Endpoint(url="", model="m", is_ours=False)
        assert request_body(asked_on, one, 1) == {**request, "ignore_eos": True}

    def test_ours_is_told_apart_by_a_salt(self) -> None:
        endpoint = Endpoint(url="", model="m", is_ours=True)
        one, other = (request_body(endpoint, make_load(1), 0) for _ in range(2))
        assert one["prompt"] == other["prompt"] == "prompt 0"
        assert one["cache_salt"] != other["cache_salt"]


class TestClosedLoop:
    def test_so_many_run_at_a_time_to_the_end(self, server: OpenAIServer) -> None:
        server.together = threading.Barrier(2)  # passed by two at a time only
        result = asyncio.run(run_closed(endpoint_of(server), make_load(5), concurrency=2))
        assert server.most_at_a_time == 2
        assert result.texts == ("".join(WORDS),) * 5
        assert result.num_tokens == 5 * len(WORDS)
        assert len(result.time_to_first_s) == len(result.durations_s) == 5
        assert len(result.chunk_gaps_s) == 5 * (len(WORDS) - 1)
        assert sum(result.durations_s) * result.tokens_per_s == pytest.approx(2 * 5 * len(WORDS))
        assert {request["seed"] for request in server.requests} == set(range(5))
        prompts = [request["prompt"] for request in server.requests]
        assert len(set(prompts)) == len(prompts)

    def test_streams_begin_with_requests_of_several_lengths_that_do_not_count(
        self, server: OpenAIServer
    ) -> None:
        server.together = threading.Barrier(4)  # so that the first four are of four streams
        result = asyncio.run(run_closed(endpoint_of(server), make_load(8), concurrency=4))
        assert sorted(request["max_tokens"] for request in server.requests[:4]) == [1, 2, 3, 5]
        assert {request["max_tokens"] for request in server.requests[4:]} == {5}
        counted = [request["seed"] for request in server.requests[4:12]]
        assert sorted(counted) == list(range(8))
        assert len(result.durations_s) == 8

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

    def test_tokens_that_nobody_counted_are_not_guessed(self, server: OpenAIServer) -> None:
        server.with_usage = False
        with pytest.raises(LoadError, match="sent no usage"):
            asyncio.run(run_closed(endpoint_of(server), make_load(1), concurrency=1))

    @pytest.mark.parametrize("event", ['{"error": {"message": "lost"}}', "what?", "[]", "{}"])
    def test_what_is_no_completion_is_shown(self, server: OpenAIServer, event: str) -> None:
        server.events = (event,)
        with pytest.raises(LoadError, match=r"lost|what\?|\[\]|\{\}"):
            asyncio.run(run_closed(endpoint_of(server), make_load(1), concurrency=1))

    def test_usage_may_stand_in_the_last_event_with_text(self, server: OpenAIServer) -> None:
        server.events = (
            '{"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}',
            '{"choices": [{"text": null}]}',
            '{"choices": [{"text": "b"}], "usage": {"completion_tokens": 2}}',
        )
        result = asyncio.run(run_closed(endpoint_of(server), make_load(1), concurrency=1))
        assert (result.num_tokens, result.texts, len(result.chunk_gaps_s)) == (2, ("ab",), 1)

    def test_a_completion_may_be_empty(self, server: OpenAIServer) -> None:
        server.events = ('{"choices": [], "usage": {"completion_tokens": 0}}',)
        result = asyncio.run(run_closed(endpoint_of(server), make_load(1), concurrency=1))
        assert (result.num_tokens, result.texts, result.time_to_first_s) == (0, ("",), ())

    def test_a_server_that_is_gone_is_named(self) -> None:
        endpoint = Endpoint(url="http://127.0.0.1:9", model="m", is_ours=False)
        with pytest.raises(LoadError, match=r"127.0.0.1:9 broke off"):
            asyncio.run(run_closed(endpoint, make_load(1), concurrency=1))


class TestOpenLoop:
    def test_requests_do_not_wait_for_each_other(self, server: OpenAIServer) -> None:
        server.together = threading.Barrier(120)  # more than a client of httpx would send by itself
        arrivals_s = [0.001 * index for index in range(120)]
        result = asyncio.run(run_open(endpoint_of(server), make_load(120), arrivals_s))
        assert (result.num_tokens, result.num_refused) == (120 * len(WORDS), 0)

    def test_refused_requests_are_counted_and_left_out(self, server: OpenAIServer) -> None:
        server.refuses_every = 2
        result = asyncio.run(run_open(endpoint_of(server), make_load(4), [0.0] * 4))
        assert (result.num_refused, result.num_tokens) == (2, 2 * len(WORDS))
        assert len(result.texts) == 2

    def test_nothing_is_measured_where_all_are_refused(self, server: OpenAIServer) -> None:
        server.refuses_every = 1
        with pytest.raises(LoadError, match="refused all of 3 requests"):
            asyncio.run(run_open(endpoint_of(server), make_load(3), [0.0] * 3))


class TestInterference:
    def test_streams_run_until_the_long_prompt_is_answered(self, server: OpenAIServer) -> None:
        server.endless_prompts = ("prompt 0", "prompt 1")
        long = Load(prompts=["long"], max_tokens=1, temperature=0.0)
        measured = asyncio.run(interfere(endpoint_of(server), make_load(2), long, alone_s=0.3))
        assert measured.began_s < measured.sent_s < measured.first_s
        assert [bool(of_stream) for of_stream in measured.chunks] == [True, True]
        assert measured.gaps_alone()
        assert server.requests[-1]["prompt"].endswith("long")

    def test_streams_that_end_before_it_measure_nothing(self, server: OpenAIServer) -> None:
        server.endless_prompts = ("prompt 0",)
        long = Load(prompts=["long"], max_tokens=1, temperature=0.0)
        with pytest.raises(LoadError, match="a stream came to the end"):
            asyncio.run(interfere(endpoint_of(server), make_load(2), long, alone_s=0.3))


class TestFindServer:
    def find(self, url: str, model: str | None = None) -> Endpoint:
        options = RemoteOptions(url=url, model=model, with_ignore_eos=True)
        return find_server(options).endpoint

    @pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
    def test_its_first_model_is_measured(self, server: OpenAIServer, path: str) -> None:
        endpoint = self.find(server.url + path)
        assert endpoint == Endpoint(url=server.url, model="first", is_ours=False)

    def test_a_name_is_taken_as_it_is(self, server: OpenAIServer) -> None:
        server.models = {"detail": "Not Found"}
        assert self.find(server.url, "other").model == "other"

    @pytest.mark.parametrize(
        ("models", "message"),
        [
            ({"data": []}, "lists no model; name one with --model"),
            ({"detail": "Not Found"}, "is no list of models .*Not Found.*name one with --model"),
            (["first"], "is no list of models"),
        ],
    )
    def test_a_server_without_models_is_explained(
        self, server: OpenAIServer, models: object, message: str
    ) -> None:
        server.models = models
        with pytest.raises(ConfigError, match=message):
            self.find(server.url)

    @pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://h:x"])
    def test_what_is_no_url_is_shown(self, url: str) -> None:
        with pytest.raises(ConfigError, match=r"--url is .* must be like http://127.0.0.1:8000"):
            self.find(url)

    def test_a_server_that_is_not_there_is_named(self) -> None:
        with pytest.raises(ConfigError, match=r"no server answers at http://127.0.0.1:9"):
            self.find("http://127.0.0.1:9")
