"""What the fields of a request say of drafts, as a client sees it."""

from typing import Any, ClassVar

import httpx
import pytest

from tests.deployments.api.test_parameters import MAX_MODEL_LEN
from tests.deployments.loops import Models
from tests.deployments.serving import LocalServing, body, client_of, complete, local_serving, stream
from tests.fakes import CHARACTERS


@pytest.fixture
def serving(drafting: LocalServing) -> LocalServing:
    return drafting


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
        """The message names the drafters that a request can ask for, so not the one of grammars."""

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
