"""Log-probabilities, echoed prompts and token ids as clients read them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import torch
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM

from cluster import bundled
from deployments.api.logprobs import completion_logprobs, prompt_logprobs
from deployments.router.sequence import Origin, TokenRecord
from deployments.router.tokenizer import TokenNames, load_tokenizer
from tests.deployments.loops import Models
from tests.deployments.serving import (
    LocalServing,
    body,
    complete,
    local_serving,
    stream,
)
from tests.fakes import CharacterTokenizer

PROMPT = "Hello, world of tokens."


@pytest.fixture
async def serving(models: Models) -> AsyncIterator[LocalServing]:
    async with local_serving(models.target, draft=models.draft) as serving:
        yield serving


async def choice_of(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    (choice,) = (await complete(client, **{"prompt": PROMPT, **fields}))["choices"]
    return choice  # type: ignore[no-any-return]


def lengths(logprobs: dict[str, Any]) -> set[int]:
    return {len(values) for values in logprobs.values()}


async def test_each_token_has_one(client: httpx.AsyncClient) -> None:
    choice = await choice_of(client, logprobs=3)
    logprobs = choice["logprobs"]
    assert lengths(logprobs) == {12}
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == list(range(12))
    assert all(logprob < 0 for logprob in logprobs["token_logprobs"])
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == logprob
        assert len(top) in (3, 4)
    assert choice["prompt_logprobs"] is choice["token_ids"] is choice["prompt_token_ids"] is None


async def test_none_asked_for_none_given(client: httpx.AsyncClient) -> None:
    assert (await choice_of(client))["logprobs"] is None


async def test_0_is_the_token_alone(client: httpx.AsyncClient) -> None:
    logprobs = (await choice_of(client, logprobs=0))["logprobs"]
    assert all(
        top == {token: logprob}
        for token, logprob, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        )
    )


async def test_a_stream_brings_them_in_parts(client: httpx.AsyncClient) -> None:
    fields: dict[str, Any] = {
        "prompt": PROMPT,
        "logprobs": 2,
        "echo": True,
        "return_token_ids": True,
    }
    whole = await choice_of(client, **fields)
    parts = [event["choices"][0] for event in await stream(client, **fields)]
    assert len(parts) > 2
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [value for part in parts for value in part["logprobs"][name]] == values
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [part["prompt_token_ids"] for part in parts[1:]] == [None] * (len(parts) - 1)


async def test_a_token_without_text_yet_is_streamed_with_its_logprob(
    client: httpx.AsyncClient,
) -> None:
    """What may become a stop string is held back, its log-probabilities are not."""
    text = (await choice_of(client))["text"]
    fields: dict[str, Any] = {"prompt": PROMPT, "logprobs": 0, "stop": [text[3:9]]}
    parts = [event["choices"][0] for event in await stream(client, **fields)]
    assert "".join(part["text"] for part in parts) == text[:3]
    assert sum(len(part["logprobs"]["tokens"]) for part in parts) == 9


class TestEcho:
    async def test_the_prompt_comes_first(self, client: httpx.AsyncClient) -> None:
        plain = await choice_of(client)
        for prompt in (PROMPT, CharacterTokenizer().encode(PROMPT)):
            assert (await choice_of(client, prompt=prompt, echo=True))["text"] == (
                PROMPT + plain["text"]
            )

    async def test_as_lm_evaluation_harness_asks(
        self, client: httpx.AsyncClient, models: Models
    ) -> None:
        """It sends context and continuation as ids, and reads those of the continuation."""
        tokens = CharacterTokenizer().encode(PROMPT)
        choice = await choice_of(
            client, prompt=[tokens], echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234
        )
        logprobs = choice["logprobs"]
        assert lengths(logprobs) == {len(tokens) + 1}
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        reference = AutoModelForCausalLM.from_pretrained(models.target.name, dtype=torch.float32)
        with torch.inference_mode():
            law = reference(torch.tensor([tokens])).logits[0].log_softmax(-1)
        expected = [float(row[token]) for row, token in zip(law[:-1], tokens[1:], strict=True)]
        assert logprobs["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-4)
        assert [max(top.values()) for top in logprobs["top_logprobs"][1:-1]] == pytest.approx(
            law[:-1].amax(-1).tolist(), abs=1e-4
        )

    async def test_the_prompt_alone(self, client: httpx.AsyncClient) -> None:
        answer = await complete(client, prompt=PROMPT, echo=True, logprobs=0, max_tokens=0)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
        assert lengths(choice["logprobs"]) == {len(PROMPT)}
        assert answer["usage"]["completion_tokens"] == 0
        one_token = await choice_of(client, prompt="H", echo=True, logprobs=0, max_tokens=0)
        assert one_token["logprobs"]["token_logprobs"] == [None]

    async def test_every_choice_has_it(self, client: httpx.AsyncClient) -> None:
        fields: dict[str, Any] = {"prompt": ["Hello", "World"], "n": 2, "echo": True, "logprobs": 1}
        choices = (await complete(client, **fields))["choices"]
        assert [choice["text"][:5] for choice in choices] == ["Hello", "Hello", "World", "World"]
        assert all(
            choice["logprobs"]["tokens"][:5] == list(choice["text"][:5]) for choice in choices
        )

    async def test_one_that_asks_does_not_change_another(self, client: httpx.AsyncClient) -> None:
        alone = await choice_of(client)
        many = await asyncio.gather(
            *[choice_of(client, echo=i % 2 == 0, logprobs=i % 3 or None) for i in range(8)]
        )
        assert {choice["text"][-12:] for choice in many} == {alone["text"]}


@pytest.mark.parametrize("max_tokens", [0, 4])
async def test_prompt_logprobs_are_made_once_and_told_with_each_choice(
    serving: LocalServing, client: httpx.AsyncClient, max_tokens: int
) -> None:
    fields: dict[str, Any] = {"prompt": [PROMPT, "Others"], "n": 3, "max_tokens": max_tokens}
    answer = await complete(client, **fields, prompt_logprobs=2)
    told = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert told == [told[0]] * 3 + [told[3]] * 3
    assert [len(told[0]), len(told[3])] == [len(PROMPT), len("Others")]
    asked = [request for batch in serving.targets.calls for request in batch]
    made = {request.seq_id for request in asked if request.num_prompt_logprobs is not None}
    assert sorted(seq_id.rpartition("-")[2] for seq_id in made) == ["0", "3"]
    if max_tokens:
        plain = await complete(client, **fields)
        assert texts_of(answer) == texts_of(plain)


async def test_choices_end_whose_prompt_logprobs_do_not_come(
    serving: LocalServing, client: httpx.AsyncClient
) -> None:
    for name in list(serving.targets.replicas):
        serving.targets.kill(name)
    response = await client.post("/v1/completions", json=body(n=3, prompt_logprobs=1))
    assert response.status_code == 503
    serving.targets.start_replica()
    await serving.wait_until_nothing_is_held()


def texts_of(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


async def test_prompt_logprobs_are_by_token_id(client: httpx.AsyncClient) -> None:
    choice = await choice_of(client, prompt_logprobs=2, max_tokens=1)
    echoed = (await choice_of(client, echo=True, logprobs=2, max_tokens=1))["logprobs"]
    tokens = CharacterTokenizer().encode(PROMPT)
    assert choice["text"] == echoed["tokens"][-1]
    assert choice["prompt_logprobs"][0] is None
    for token, entry, logprob in zip(
        tokens[1:], choice["prompt_logprobs"][1:], echoed["token_logprobs"][1:-1], strict=True
    ):
        own = entry[str(token)]
        assert own["logprob"] == pytest.approx(logprob, abs=1e-5)
        assert own["decoded_token"] == CharacterTokenizer().decode(
            [token], skip_special_tokens=True
        )
        ranks = [other["rank"] for other in entry.values() if other["rank"] is not None]
        assert sorted(ranks) == [1, 2]


async def test_token_ids_are_returned(client: httpx.AsyncClient) -> None:
    choice = await choice_of(client, return_token_ids=True)
    tokenizer = CharacterTokenizer()
    assert choice["prompt_token_ids"] == tokenizer.encode(PROMPT)
    assert tokenizer.decode(choice["token_ids"], skip_special_tokens=True) == choice["text"]


async def test_tokens_may_be_named_by_their_ids(client: httpx.AsyncClient) -> None:
    choice = await choice_of(
        client, logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True
    )
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names


async def test_the_best_of_several_are_the_likeliest(client: httpx.AsyncClient) -> None:
    """By the log-probability of all tokens together; all that were made are paid for."""
    made = await complete(client, n=5, logprobs=0)
    sums = {c["text"]: sum(c["logprobs"]["token_logprobs"]) for c in made["choices"]}
    best = await complete(client, n=2, best_of=5)
    assert [c["text"] for c in best["choices"]] == sorted(sums, key=sums.__getitem__)[:2:-1]
    assert [c["index"] for c in best["choices"]] == [0, 1]
    assert all(c["logprobs"] is None for c in best["choices"])
    assert best["usage"]["completion_tokens"] == made["usage"]["completion_tokens"] == 60
    of_two = await complete(client, prompt=["Hello", "World"], n=1, best_of=3, logprobs=1)
    assert len(of_two["choices"]) == 2
    assert of_two["choices"][1]["logprobs"] is not None


async def test_openais_client_reads_them(client: httpx.AsyncClient) -> None:
    openai = AsyncOpenAI(base_url="http://test/v1", api_key="unused", http_client=client)
    fields: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6, "seed": 3, "logprobs": 2}
    answer = await openai.completions.create(model="tiny", echo=True, best_of=1, **fields)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert answer.choices[0].text.startswith(PROMPT)
    assert answer.usage is not None
    assert answer.usage.model_extra is not None
    assert answer.usage.model_extra["speculation"]["rounds"] > 0
    streamed: list[str] = []
    options: Any = {"extra_body": {"speculation": {"mode": "off"}, "min_tokens": 3}}
    async for event in await openai.completions.create(
        model="tiny", stream=True, **fields, **options
    ):
        assert event.choices[0].logprobs is not None
        streamed += event.choices[0].logprobs.tokens or []
    assert "".join(streamed) == answer.choices[0].text.removeprefix(PROMPT)


def record(token_id: int, logprob: float, *top: tuple[int, float]) -> TokenRecord:
    return TokenRecord(
        token_id=token_id,
        text="",
        text_offset=0,
        origin=Origin.OWN,
        logprob=logprob,
        top_logprobs=top,
    )


def test_a_probability_of_0_is_a_number_in_json() -> None:
    inf = float("inf")
    one = record(5, -inf, (4, 0.0), (3, -inf))
    written = completion_logprobs([one], str, num_top=2, first_offset=0)
    assert written.token_logprobs == [-9999.0]
    assert written.top_logprobs == [{"4": 0.0, "3": -9999.0, "5": -9999.0}]
    (by_id,) = prompt_logprobs([one], str, num_top=1)
    assert by_id is not None
    assert {token: entry["logprob"] for token, entry in by_id.items()} == {5: -9999.0, 4: 0.0}


def test_of_tokens_that_look_alike_the_likeliest_counts() -> None:
    one = record(9, -3.0, (1, -0.5), (2, -1.0), (3, -2.0))
    names = {1: "\ufffd", 2: "\ufffd", 3: "a", 9: "b"}
    written = completion_logprobs([one], names.__getitem__, num_top=3, first_offset=0)
    assert written.top_logprobs == [{"\ufffd": -0.5, "a": -2.0, "b": -3.0}]


class TestNames:
    def test_a_token_is_named_by_its_text(self) -> None:
        tokenizer = load_tokenizer(bundled.resolve(bundled.TARGET_NAME))
        names = TokenNames(tokenizer)
        for text in ("def f(x):", "naïve 日本", "<|endoftext|>"):
            tokens = tokenizer.encode(text)
            if "\ufffd" not in (spelt := "".join(names.name(token) for token in tokens)):
                assert spelt == text
        assert names.name(tokenizer.get_vocab()["<|endoftext|>"]) == "<|endoftext|>"

    def test_a_words_beginning_keeps_its_space(self) -> None:
        """Where the vocabulary marks it: decoded alone, such a token loses it."""

        class Marked(CharacterTokenizer):
            def get_vocab(self) -> dict[str, int]:
                return {"▁the": 0, "the": 1}

            def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:  # noqa: ARG002
                return "the"

        names = TokenNames(Marked())
        assert [names.name(token) for token in (0, 1)] == [" the", "the"]
