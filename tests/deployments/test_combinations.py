"""Every field with every drafter and draft length: the same tokens, texts and log-probabilities.

In float32, over a service in this process. The reference is plain decoding, each request alone, and
for log-probabilities transformers' own forward.
"""

import asyncio
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.options import AppArgs
from deployments.api.chat import ChatCompletionRequest
from deployments.api.completions import CompletionRequest
from deployments.router.chat.template import ChatTemplate
from deployments.router.sequence import Delta
from tests.deployments.combinations import (
    CHAT_TEMPLATE,
    FEATURES,
    FREQUENT,
    GREEDY,
    SAMPLED,
    STOP_TOKENS,
    TRIED,
    Gamma,
    has_one_text,
)
from tests.deployments.loops import CACHE, Models
from tests.deployments.serving import LocalServing, local_serving
from tests.grammars import END_TOKEN, save_grammar_model
from tests.tokenizers import save_permuted
from workers.drafters.translated import make_drafter
from workers.model import Model
from workers.vocabulary import compare_vocabularies

PROMPTS = ["the cat and the cat and the", "x", "def f(a, b): return a + b # " * 2]
NUM_TOKENS = 24
TOLERANCE = 1e-4

Request = CompletionRequest | ChatCompletionRequest
Case = tuple[str, str, int]
"""A feature, how tokens are chosen, and which prompt."""
Answers = dict[Case, list[Delta]]


def request(prompt: str, **fields: Any) -> Request:
    if "tools" not in fields:
        return CompletionRequest.model_validate({"prompt": prompt, **fields})
    message = {"role": "user", "content": prompt}
    return ChatCompletionRequest.model_validate({"messages": [message], **fields})


def requests() -> dict[Case, Request]:
    return {
        (name, word, index): request(
            prompt, **{"max_tokens": NUM_TOKENS, "seed": 11 + index, **way, **fields}
        )
        for name, fields in FEATURES.items()
        for word, way in {"greedy": GREEDY, "sampled": SAMPLED}.items()
        for index, prompt in enumerate(PROMPTS)
    }


async def answer(serving: LocalServing, request: Request) -> list[Delta]:
    async with serving.service.open(request.generation_request()) as generation:
        return await generation.complete()


async def answer_all(serving: LocalServing, *, at_a_time: int) -> Answers:
    slots = asyncio.Semaphore(at_a_time)

    async def one(request: Request) -> list[Delta]:
        async with slots:
            return await answer(serving, request)

    cases = requests()
    return dict(zip(cases, await asyncio.gather(*[one(r) for r in cases.values()]), strict=True))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A pair of models with a tokenizer, which grammars need."""
    name = save_grammar_model(tmp_path_factory.mktemp("pair"))
    return Models.load(name)


@pytest.fixture(scope="module")
def tokenizer(models: Models) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(models.target.name)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def plain(models: Models, tokenizer: Any) -> Answers:
    """Plain decoding, one request at a time."""

    async def run() -> Answers:
        async with local_serving(
            models.target,
            gamma=0,
            drafter="none",
            tokenizer=tokenizer,
            chat_template=ChatTemplate(tokenizer),
        ) as serving:
            return await answer_all(serving, at_a_time=1)

    return asyncio.run(run())


def shown(delta: Delta) -> dict[str, Any]:
    """What a client can see of a completion, but for log-probabilities."""
    return {
        "token_ids": delta.token_ids,
        "texts": [(record.text, record.text_offset) for record in delta.records],
        "finish_reason": delta.finish_reason,
        "prompt": [(record.token_id, record.text) for record in delta.prompt],
        "top": [
            record.top_logprobs and [token for token, _ in record.top_logprobs]
            for record in (*delta.prompt, *delta.records)
        ],
    }


def logprobs_of(delta: Delta) -> list[float]:
    """All log-probabilities of a delta in a row, those of the likeliest tokens too."""
    return [
        logprob
        for record in (*delta.prompt, *delta.records)
        if record.logprob is not None
        for logprob in (record.logprob, *[other for _, other in record.top_logprobs or ()])
    ]


@pytest.fixture(scope="module")
def permuted(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The target, slightly off, with other ids for its tokens."""
    name = save_permuted(models.target.name, tmp_path_factory.mktemp("permuted"))
    return Models.load(name).draft


@pytest.mark.parametrize(
    ("option", "gamma"),
    [(option, gamma) for option, gammas in TRIED.items() for gamma in gammas],
    ids=str,
)
async def test_drafts_change_nothing(
    option: str, gamma: Gamma, models: Models, permuted: Model, tokenizer: Any, plain: Answers
) -> None:
    name, _, value = option.partition("=")
    others: dict[str, Any] = {"early_exit_layer": 2} if "early_exit" in value else {}
    args = AppArgs.model_validate({name: value, **others})
    target, draft = models.target, permuted if name == "heterogeneous_vocab" else models.draft
    vocabulary = compare_vocabularies(target.name, draft.name, args.heterogeneous_vocab)
    async with local_serving(
        target,
        draft_worker=lambda: make_drafter(draft, vocabulary, CACHE, target=target.name),
        drafter=args.drafter,
        gamma=gamma,
        tokenizer=tokenizer,
        chat_template=ChatTemplate(tokenizer),
    ) as serving:
        answers = await answer_all(serving, at_a_time=12)
        await serving.wait_until_nothing_is_held()
    for case, deltas in answers.items():
        if gamma != 0 and not has_one_text(*case[:2]):
            assert all(delta.finish_reason for delta in deltas)
            continue
        assert [shown(delta) for delta in deltas] == [shown(delta) for delta in plain[case]], case
        for delta, expected in zip(deltas, plain[case], strict=True):
            assert logprobs_of(delta) == pytest.approx(logprobs_of(expected), abs=TOLERANCE), case
    sources = {
        record.source for deltas in answers.values() for delta in deltas for record in delta.records
    }
    if gamma == 8:  # a dynamic one drafts for tiny models as the clock says
        assert {*args.drafters} <= sources
    if gamma == 0:
        assert sources == {""}


def test_log_probabilities_are_those_of_a_plain_forward(
    models: Models, tokenizer: Any, plain: Answers
) -> None:
    reference = Reference(models.target)
    num_checked = 0
    for case, request in requests().items():
        text = PROMPTS[case[2]]
        if isinstance(request, ChatCompletionRequest):
            messages = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(
                messages, tools=request.tools, tokenize=False, **request.chat_template_kwargs
            )
        prompt = tuple(tokenizer.encode(text))
        for delta in plain[case]:
            law = reference.law(prompt + delta.token_ids)
            for position, record in enumerate(delta.records, start=len(prompt)):
                num_checked += reference.check(record, law[position - 1], request.num_logprobs)
            for position, record in enumerate(delta.prompt[1:], start=1):
                num_checked += reference.check(record, law[position - 1], None)
    assert num_checked > 500


class Reference:
    """transformers' own forward, without a cache."""

    def __init__(self, model: Model) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model.name, dtype=torch.float32).eval()

    def law(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """log softmax behind each token.  # [len(tokens), vocab]"""
        with torch.inference_mode():
            return self._model(torch.tensor([tokens])).logits[0].log_softmax(-1)

    def check(self, record: Any, law: torch.Tensor, num_top: int | None) -> int:
        """How many log-probabilities of a token were found right."""
        if record.logprob is None:
            assert num_top is None
            return 0
        assert record.logprob == pytest.approx(float(law[record.token_id]), abs=TOLERANCE)
        top = record.top_logprobs
        assert num_top is None or len(top) == num_top
        for (token_id, logprob), highest in zip(top, law.topk(len(top)).values, strict=True):
            assert logprob == pytest.approx(float(law[token_id]), abs=TOLERANCE)
            assert logprob == pytest.approx(float(highest), abs=TOLERANCE)
        return 1 + len(top)


@pytest.mark.parametrize(
    "name",
    ["top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
     "logit_bias", "seed", "stop", "stop_token_ids", "min_tokens", "bad_words", "n", "best_of",
     "response_format", "structured_outputs", "guided_regex", "guided_choice", "guided_grammar",
     "tool_choice", "tool_choice with thoughts"],
)  # fmt: skip
def test_a_field_shows(name: str, plain: Answers) -> None:
    """What is compared above is not the same text for every field."""
    tokens, without = (
        [delta.token_ids for index in range(len(PROMPTS)) for delta in plain[key, "sampled", index]]
        for key in (name, "no field but temperature")
    )
    assert tokens != without


def test_texts_are_what_the_fields_say(tokenizer: Any, plain: Answers) -> None:
    """The texts of plain decoding are compared with what each field is said to do."""
    banned = {token for character in FREQUENT for token in tokenizer.encode(character)}
    for index in range(len(PROMPTS)):
        for way in ("greedy", "sampled"):
            (base,) = plain["no field but temperature", way, index]
            (stopped,) = plain["stop_token_ids", way, index]
            ends = [
                i for i, token in enumerate(base.token_ids) if token in (END_TOKEN, *STOP_TOKENS)
            ]
            end = ends[0] + 1 if ends else NUM_TOKENS
            assert stopped.token_ids == base.token_ids[:end]
            (delayed,) = plain["min_tokens", way, index]
            assert len(delayed.token_ids) > 11
            assert not {*delayed.token_ids[:12]} & {END_TOKEN, *STOP_TOKENS}
            (clean,) = plain["bad_words", way, index]
            assert not {*clean.token_ids} & banned
            (nothing,) = plain["max_tokens of 0, with echo", way, index]
            assert (nothing.text, nothing.finish_reason) == ("", "length")
            assert "".join(record.text for record in nothing.prompt) == PROMPTS[index]
