"""What the fields of a request do, as a client sees it."""

from typing import Any

import httpx
import pytest

from cluster import bundled
from deployments.router.prompts import PromptReader
from deployments.router.tenants.keys import ANYBODY
from deployments.router.tokenizer import load_tokenizer
from tests.deployments.serving import LocalServing, body, complete, stream, text_of
from tests.fakes import CharacterTokenizer

MAX_MODEL_LEN = 256
"""The longest context of the model that is served, in tokens."""


@pytest.fixture
def serving(drafting: LocalServing) -> LocalServing:
    return drafting


class TestLengths:
    async def test_openais_newer_name_bounds_too(self, client: httpx.AsyncClient) -> None:
        plain = await text_of(client)
        fields: dict[str, Any] = {"max_tokens": None, "max_completion_tokens": 5}
        assert await text_of(client, **fields) == plain[:5]
        assert await text_of(client, max_completion_tokens=12) == plain
        request = {"prompt": "a", "max_tokens": 3, "max_completion_tokens": 4}
        response = await client.post("/v1/completions", json=request)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "max_completion_tokens"

    async def test_the_prompt_alone_is_streamed(self, client: httpx.AsyncClient) -> None:
        fields: dict[str, Any] = {"max_tokens": 0, "echo": True, "logprobs": 1, "n": 2}
        events = [event["choices"][0] for event in await stream(client, **fields)]
        assert [(event["index"], event["text"]) for event in events] == [(0, "Hello"), (1, "Hello")]
        assert [event["finish_reason"] for event in events] == ["length"] * 2


class TestEnds:
    async def test_a_stop_token_ends_the_text_before_it(self, client: httpx.AsyncClient) -> None:
        plain = await text_of(client)
        token = CharacterTokenizer().encode(plain[6])[0]
        end = plain.index(plain[6])
        answer = await complete(client, stop_token_ids=[token])
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (plain[:end], "stop")
        assert answer["usage"]["completion_tokens"] == end + 1
        included = await text_of(client, stop_token_ids=[token], include_stop_str_in_output=True)
        assert included == plain[: end + 1]

    async def test_the_stop_string_may_be_kept(self, client: httpx.AsyncClient) -> None:
        plain = await text_of(client)
        stop = plain[4:7]
        end = plain.index(stop)
        assert await text_of(client, stop=stop) == plain[:end]
        included = await text_of(client, stop=stop, include_stop_str_in_output=True)
        assert included == plain[: end + 3]

    async def test_of_stops_in_one_place_the_shortest_ends_the_text(
        self, client: httpx.AsyncClient
    ) -> None:
        plain = await text_of(client)
        stops = [plain[4:8], plain[4:6], plain[4:7]]
        text = await text_of(client, stop=stops, include_stop_str_in_output=True)
        assert text == plain[: plain.index(plain[4:6]) + 2]

    async def test_nothing_ends_the_text_before_min_tokens(self, client: httpx.AsyncClient) -> None:
        plain = await text_of(client)
        assert await text_of(client, stop=plain[2], min_tokens=12) == plain
        later = await text_of(client, stop=list({*plain}), min_tokens=5)
        assert later == plain[:5]
        tokens = CharacterTokenizer().encode(plain)
        answer = await complete(client, stop_token_ids=tokens, min_tokens=5, return_token_ids=True)
        (choice,) = answer["choices"]
        assert not {*choice["token_ids"][:5]} & {*tokens}

    async def test_more_than_max_tokens_is_refused(self, client: httpx.AsyncClient) -> None:
        for fields in ({"min_tokens": 13}, {"min_tokens": 13, "max_completion_tokens": 12}):
            response = await client.post("/v1/completions", json=body(**fields))
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "min_tokens")
            assert error["message"] == (
                "min_tokens is 13 and max_tokens is 12: no completion can have so many tokens; "
                "lower min_tokens or raise max_tokens"
            )

    async def test_eos_is_put_off_too(self, client: httpx.AsyncClient) -> None:
        fields: dict[str, Any] = {"logit_bias": {"2": 100}, "ignore_eos": False}
        first = await complete(client, **fields)
        assert first["usage"]["completion_tokens"] == 1
        later = await complete(client, min_tokens=7, **fields)
        assert later["usage"]["completion_tokens"] == 8
        assert later["choices"][0]["finish_reason"] == "stop"
        ignored = await complete(client, **{**fields, "min_tokens": 7, "ignore_eos": True})
        assert ignored["choices"][0]["text"] == CharacterTokenizer().decode(
            [2] * 12, skip_special_tokens=True
        )


class TestBadWords:
    async def test_they_do_not_stand_in_the_text(self, client: httpx.AsyncClient) -> None:
        plain = await text_of(client, temperature=0)
        for word in (plain[3], plain[3:5], plain[2:5]):
            text = await text_of(client, temperature=0, bad_words=[word])
            assert word not in text
            assert text[: plain.index(word)] == plain[: plain.index(word)]

    async def test_a_request_that_rules_all_out_fails_alone(
        self, client: httpx.AsyncClient
    ) -> None:
        characters = CharacterTokenizer().decode(list(range(97)), skip_special_tokens=True)
        request = {"prompt": "a", "bad_words": list(characters), "max_tokens": 3}
        response = await client.post("/v1/completions", json=request)
        assert response.status_code == 400
        assert (
            "bad_words, min_tokens and the other parameters of the request"
            in response.json()["error"]["message"]
        )
        await complete(client)


class TestModelNames:
    @pytest.mark.parametrize("model", ["tiny", "small", "t/1", None])
    async def test_the_one_model_has_several(
        self, model: str | None, client: httpx.AsyncClient
    ) -> None:
        assert (await complete(client, model=model))["model"] == "tiny"

    async def test_all_are_listed(self, client: httpx.AsyncClient) -> None:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["tiny", "small", "t/1"]
        assert (await client.get("/v1/models/t/1")).json() == listed[2]
        assert (await client.get("/v1/models/other")).status_code == 404

    async def test_another_is_refused(self, client: httpx.AsyncClient) -> None:
        response = await client.post("/v1/completions", json={"model": "gpt", "prompt": "a"})
        assert response.status_code == 404
        assert "'tiny' or 'small' or 't/1'" in response.json()["error"]["message"]


class TestSpecialTokens:
    """With the bundled tokenizer, which names one."""

    @pytest.fixture
    def reader(self) -> PromptReader:
        tokenizer = load_tokenizer(bundled.resolve(bundled.TARGET_NAME))
        return PromptReader(tokenizer, max_model_len=100)

    async def test_their_names_may_be_a_text_like_any_other(self, reader: PromptReader) -> None:
        text = "a<|endoftext|>b"
        (parsed,) = await reader.read([text])
        (literal,) = await reader.read([text], parse_special_tokens=False)
        assert len(parsed) == 3
        assert len(literal) > 3
        assert parsed[1] not in literal
        (again,) = await reader.read([text])
        assert again == parsed
        (split,) = await reader.split([literal], ANYBODY, skip_special_tokens=True)
        assert "".join(split) == text

    async def test_their_text_may_be_shown(self, reader: PromptReader) -> None:
        (tokens,) = await reader.read(["a<|endoftext|>b"])
        (hidden,) = await reader.split([tokens], ANYBODY, skip_special_tokens=True)
        (shown,) = await reader.split([tokens], ANYBODY, skip_special_tokens=False)
        assert "".join(hidden) == "ab"
        assert shown == ("a", "<|endoftext|>", "b")

    async def test_a_bad_word_is_read_with_and_without_a_space(self, reader: PromptReader) -> None:
        words = await reader.read_words(["class", " class", "x"], ANYBODY)
        assert len(words) == 4
        assert all(words)

    async def test_a_bad_word_of_white_space_is_only_itself(self, reader: PromptReader) -> None:
        (newline,) = await reader.read_words(["\n"], ANYBODY)
        assert (newline,) == tuple(await reader.read(["\n"], add_special_tokens=False))
