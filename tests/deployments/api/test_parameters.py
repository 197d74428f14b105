"""What the fields of a request do, as a client sees it."""

from collections.abc import AsyncIterator
from typing import Any, ClassVar

import httpx
import pytest

from cluster import bundled
from deployments.router.prompts import PromptReader
from deployments.router.tenants.keys import ANYBODY
from deployments.router.tokenizer import load_tokenizer
from tests.deployments.loops import Models
from tests.deployments.serving import (
    LocalServing,
    body,
    client_of,
    complete,
    local_serving,
    stream,
)
from tests.fakes import CHARACTERS, CharacterTokenizer

MAX_MODEL_LEN = 256
"""The longest context of the model that is served, in tokens."""


@pytest.fixture
async def serving(models: Models) -> AsyncIterator[LocalServing]:
    async with local_serving(
        models.target, draft=models.draft, drafter="prompt_lookup,model", aliases=("small", "t/1")
    ) as serving:
        yield serving


async def text_of(client: httpx.AsyncClient, **fields: Any) -> str:
    (choice,) = (await complete(client, **fields))["choices"]
    events = await stream(client, **fields)
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    return choice["text"]  # type: ignore[no-any-return]


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


class TestSpeculation:
    async def test_the_usage_says_what_became_of_drafts(self, client: httpx.AsyncClient) -> None:
        usage = (await complete(client, max_tokens=40))["usage"]
        told = usage["speculation"]
        assert told["drafted_tokens"] >= told["tested_tokens"] >= told["accepted_tokens"] > 0
        assert sum(told["accepted_by_position"]) == told["accepted_tokens"]
        assert told["accepted_by_position"] == sorted(told["accepted_by_position"], reverse=True)
        assert told["tested_tokens"] <= told["accepted_tokens"] + told["rounds"]
        assert 1 <= told["tokens_per_verify"] <= 1 + len(told["accepted_by_position"])
        details = usage["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == told["accepted_tokens"]
        rejected = told["drafted_tokens"] - told["accepted_tokens"]
        assert details["rejected_prediction_tokens"] == rejected

    @pytest.mark.parametrize(
        "speculation", [{"mode": "off"}, {"num_speculative_tokens": 0}], ids=str
    )
    async def test_it_can_be_off(self, speculation: Any, client: httpx.AsyncClient) -> None:
        plain = await complete(client)
        off = await complete(client, speculation=speculation)
        assert off["choices"] == plain["choices"]
        assert off["usage"]["speculation"] == {
            "rounds": 0,
            "drafted_tokens": 0,
            "tested_tokens": 0,
            "accepted_tokens": 0,
            "accepted_by_position": [],
            "tokens_per_verify": None,
        }

    async def test_whoever_asks_for_another_drafter_is_told_which_there_are(
        self, client: httpx.AsyncClient
    ) -> None:
        """Those that a request can ask for: what grammars force is drafted without being asked."""

        async def ask(mode: str) -> httpx.Response:
            prediction = {"type": "content", "content": "abc"}
            fields = body(speculation={"mode": mode}, prediction=prediction)
            return await client.post("/v1/completions", json=fields)

        response = await ask("suffix")
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert message == (
            "speculation.mode is 'suffix'; the drafters of this app are: 'predicted', "
            "'prompt_lookup', 'model'; use one of them, 'auto' or 'off'"
        )
        for mode in ("predicted", "prompt_lookup", "model", "auto", "off"):
            assert (await ask(mode)).status_code == 200

    @pytest.mark.parametrize("mode", ["model", "prompt_lookup"])
    async def test_one_drafter_alone_may_draft(
        self, mode: str, client: httpx.AsyncClient, serving: LocalServing
    ) -> None:
        num_calls = len(serving.drafts.calls)
        fields: dict[str, Any] = {"max_tokens": 40, "temperature": 0}
        answer = await complete(client, speculation={"mode": mode}, **fields)
        assert (len(serving.drafts.calls) > num_calls) == (mode == "model")
        assert answer["choices"] == (await complete(client, **fields))["choices"]

    async def test_drafts_can_be_bounded(self, client: httpx.AsyncClient) -> None:
        bounded = await complete(client, max_tokens=40, speculation={"num_speculative_tokens": 1})
        told = bounded["usage"]["speculation"]
        assert told["drafted_tokens"] == told["rounds"] > 0
        assert len(told["accepted_by_position"]) <= 1
        more = await complete(client, max_tokens=40, speculation={"num_speculative_tokens": 64})
        assert more["choices"] == bounded["choices"]


class TestPrediction:
    FIELDS: ClassVar[dict[str, Any]] = {"max_tokens": 48, "temperature": 0, "ignore_eos": True}

    @staticmethod
    def content(text: str | list[dict[str, str]]) -> dict[str, Any]:
        return {"type": "content", "content": text}

    async def test_it_is_drafted_from_and_changes_nothing(self, client: httpx.AsyncClient) -> None:
        plain = await complete(client, **self.FIELDS)
        text = plain["choices"][0]["text"]
        parts = [{"type": "text", "text": part} for part in (text[:20], text[20:])]
        for content in (text, parts):
            answer = await complete(client, prediction=self.content(content), **self.FIELDS)
            assert answer["choices"] == plain["choices"]
            details = answer["usage"]["completion_tokens_details"]
            assert 30 < details["accepted_prediction_tokens"] < 48
            assert details["rejected_prediction_tokens"] == 0
            events = await stream(client, prediction=self.content(content), **self.FIELDS)
            assert "".join(event["choices"][0]["text"] for event in events) == text

    async def test_usage_tells_its_drafts_from_those_of_others(
        self, client: httpx.AsyncClient
    ) -> None:
        text = (await complete(client, **self.FIELDS))["choices"][0]["text"]
        half = await complete(client, prediction=self.content(text[24:]), **self.FIELDS)
        accepted = half["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
        assert 0 < accepted < half["usage"]["speculation"]["accepted_tokens"]
        absent = next(character for character in CHARACTERS if character not in text)
        wrong = await complete(client, prediction=self.content(absent * 50), **self.FIELDS)
        assert wrong["choices"] == half["choices"]
        assert wrong["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0
        assert wrong["usage"]["speculation"]["accepted_tokens"] > 0

    @pytest.mark.parametrize("mode", ["off", "model", "predicted"])
    async def test_a_request_may_choose(self, mode: str, client: httpx.AsyncClient) -> None:
        text = (await complete(client, **self.FIELDS))["choices"][0]["text"]
        answer = await complete(
            client,
            prediction=self.content(text),
            speculation={"mode": mode, "num_speculative_tokens": 0 if mode == "off" else 8},
            **self.FIELDS,
        )
        accepted = answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
        assert (accepted > 0) is (mode == "predicted")
        assert answer["choices"][0]["text"] == text

    @pytest.mark.parametrize(
        ("prediction", "param", "words"),
        [
            ({"type": "content"}, "prediction.content", ["missing"]),
            ({"type": "file", "content": "a"}, "prediction.type", ["'file'", "content"]),
            ({"type": "content", "content": 5}, "prediction.content", ["5", "a string"]),
            (
                {"type": "content", "content": [{"type": "image_url", "image_url": "x"}]},
                "prediction.content",
                ["part 0", "'image_url'", "'text'"],
            ),
            (
                {"type": "content", "content": "a" * (MAX_MODEL_LEN + 1)},
                "prediction",
                [f"prediction has {MAX_MODEL_LEN + 1} characters", "shorten the prediction"],
            ),
            ("text", "prediction", ["an object"]),
        ],
        ids=str,
    )
    async def test_a_wrong_one_is_refused(
        self, prediction: Any, param: str, words: list[str], client: httpx.AsyncClient
    ) -> None:
        response = await client.post("/v1/completions", json=body(prediction=prediction))
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert all(word in error["message"] for word in words), error

    async def test_one_of_more_tokens_than_the_context_is_refused(
        self, client: httpx.AsyncClient, serving: LocalServing, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As where tokens have several characters, so that no length tells."""
        monkeypatch.setattr(serving.service._prompts, "_longest_token", 4)
        prediction = self.content("a" * (MAX_MODEL_LEN + 1))
        response = await client.post("/v1/completions", json=body(prediction=prediction))
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "prediction")
        assert error["code"] == "context_length_exceeded"
        assert f"{MAX_MODEL_LEN + 1} tokens, but the context of 'tiny' is" in error["message"]
        answer = await complete(client, prediction=self.content("a" * MAX_MODEL_LEN))
        assert answer["usage"]["completion_tokens"] > 0


class TestVerification:
    @pytest.mark.parametrize("rule", ["rejection", "block"])
    async def test_a_request_chooses_its_rule(self, rule: str, client: httpx.AsyncClient) -> None:
        """By which drafts are accepted too; greedy texts are those of any rule."""
        fields: dict[str, Any] = {"max_tokens": 40, "speculation": {"verification": rule}}
        told = (await complete(client, **fields))["usage"]["speculation"]
        assert told["drafted_tokens"] >= told["tested_tokens"] >= told["accepted_tokens"] > 0
        greedy = await complete(client, temperature=0, **fields)
        plain = await complete(client, temperature=0, max_tokens=40)
        assert greedy["choices"] == plain["choices"]

    @pytest.mark.parametrize(
        ("asked", "rules"), [(None, {"block"}), ("rejection", {"rejection"})], ids=str
    )
    async def test_the_apps_rule_is_that_of_requests_that_name_none(
        self, asked: str | None, rules: set[str], models: Models
    ) -> None:
        speculation = None if asked is None else {"verification": asked}
        async with (
            local_serving(models.target, verification="block") as serving,
            client_of(serving) as client,
        ):
            await complete(client, speculation=speculation)
            for workers in (serving.targets, serving.drafts):
                assert {r.rule for batch in workers.calls for r in batch} == rules


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
