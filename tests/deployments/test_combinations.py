"""Every field with every drafter and draft length: the same tokens, texts and log-probabilities.

In float32, over a service in this process. The reference is plain decoding, each request alone, and
for log-probabilities transformers' own forward.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.options import AppArgs
from deployments.api.chat import ChatCompletionRequest
from deployments.router.chat.template import ChatTemplate
from deployments.router.generation import Usage
from deployments.router.policy.controller import DynamicGamma
from deployments.router.policy.gamma import ObservedRound, Reason
from deployments.router.sequence import Delta
from tests.deployments.combinations import (
    CHAT_TEMPLATE,
    FEATURES,
    FREQUENT,
    MIN_TOKENS,
    NUM_TOKENS,
    PROMPTS,
    STOP_TOKENS,
    TRIED,
    UNDRAFTED,
    Case,
    Gamma,
    Request,
    Requests,
    has_one_text,
    requests,
    some_requests,
)
from tests.deployments.loops import CACHE, EARLY_EXIT_LAYER, Models, load_noisy
from tests.deployments.serving import LocalServing, local_serving
from tests.grammars import END_TOKEN, save_grammar_model
from tests.tokenizers import save_permuted
from workers.drafters.translated import make_drafter
from workers.model import Model
from workers.vocabulary import compare_vocabularies

TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of a request."""

    deltas: list[Delta]
    usage: Usage
    num_run: int
    """Tokens that the target ran meanwhile: for this request, where it was alone."""

    @property
    def num_prompt_run(self) -> int:
        """The part of `num_run` that was not cached before; every token but the last is run."""
        return self.num_run - sum(len(delta.records) - 1 for delta in self.deltas)


Answers = dict[Case, Answer]


class CheapDrafts(DynamicGamma):
    """A dynamic gamma on a machine where drafts always pay: verifying takes a second, however many
    there are, and a round that is not its best choice takes ten seconds in all."""

    def observe(self, observed: ObservedRound) -> None:
        super().observe(
            replace(
                observed,
                verify_s=1.0,
                verify_compute_s=1.0,
                draft_s=None if observed.draft_s is None else 1e-6,
                draft_compute_s=0.0,
                draft_further_s=0.0,
                ahead_s=None if observed.ahead_s is None else 1e-6,
                router_s=0.0,
                round_s=1.0 if observed.reason is Reason.BEST else 10.0,
            )
        )


async def answer(serving: LocalServing, request: Request) -> Answer:
    (target,) = serving.targets.replicas.values()
    num_run = target.work.num_tokens
    async with serving.service.open(request.generation_request()) as generation:
        deltas = await generation.complete()
    return Answer(deltas=deltas, usage=generation.usage, num_run=target.work.num_tokens - num_run)


async def answer_all(serving: LocalServing, cases: Requests, *, at_a_time: int) -> Answers:
    slots = asyncio.Semaphore(at_a_time)

    async def one(request: Request) -> Answer:
        async with slots:
            return await answer(serving, request)

    return dict(zip(cases, await asyncio.gather(*[one(r) for r in cases.values()]), strict=True))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A pair of models with a tokenizer, which grammars need."""
    name = save_grammar_model(tmp_path_factory.mktemp("pair"), family=None)
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
            return await answer_all(serving, requests(), at_a_time=1)

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
    return load_noisy(name)


CELLS = [(option, gamma) for option, gammas in TRIED.items() for gamma in gammas]


@pytest.mark.parametrize(("option", "gamma"), CELLS, ids=str)
async def test_drafts_change_nothing(
    option: str,
    gamma: Gamma,
    has_all_combinations: bool,
    models: Models,
    permuted: Model,
    tokenizer: Any,
    plain: Answers,
) -> None:
    name, _, value = option.partition("=")
    others: dict[str, Any] = {"early_exit_layer": EARLY_EXIT_LAYER} if "early_exit" in value else {}
    args = AppArgs.model_validate({name: value, **others})
    target, draft = models.target, permuted if name == "heterogeneous_vocab" else models.draft
    vocabulary = compare_vocabularies(target.name, draft.name, args.heterogeneous_vocab)
    async with local_serving(
        target,
        draft_worker=lambda: make_drafter(draft, vocabulary, CACHE, target=target.name),
        drafter=args.drafter,
        gamma=CheapDrafts() if gamma == "dynamic" else gamma,
        tokenizer=tokenizer,
        chat_template=ChatTemplate(tokenizer),
        max_running=32,
    ) as serving:
        cases = (
            requests()
            if has_all_combinations
            else some_requests(CELLS.index((option, gamma)), gamma)
        )
        answers = await answer_all(serving, cases, at_a_time=24)
        await serving.wait_until_nothing_is_held()
    for case, answer in answers.items():
        if gamma != 0 and not has_one_text(*case[:2]):
            assert all(delta.finish_reason for delta in answer.deltas)
        else:
            check_that_it_is_shown(answer.deltas, plain[case].deltas, case)
    check_drafts(answers, args.drafters, gamma=gamma)


def check_that_it_is_shown(deltas: list[Delta], expected: list[Delta], case: Case) -> None:
    assert [shown(delta) for delta in deltas] == [shown(delta) for delta in expected], case
    for delta, other in zip(deltas, expected, strict=True):
        assert logprobs_of(delta) == pytest.approx(logprobs_of(other), abs=TOLERANCE), case


def check_drafts(answers: Answers, drafters: Sequence[str], *, gamma: int | str) -> None:
    """Every feature has drafts tested, and each drafter and the grammars some accepted. A policy
    may leave some without, by the order in which rounds end; there, each drafter has some."""
    num_tested: Counter[str] = Counter()
    sources: set[str] = set()
    for (feature, _, _), answer in answers.items():
        num_tested[feature] += answer.usage.speculation.num_tested
        sources |= {record.source for delta in answer.deltas for record in delta.records}
    tested = {name for name in FEATURES if num_tested[name]}
    if gamma == 0:
        assert (tested, sources) == (set(), {""})
    elif gamma == "dynamic":
        assert tested <= FEATURES.keys() - UNDRAFTED
        assert sources >= {*drafters}
    else:
        assert tested == FEATURES.keys() - UNDRAFTED
        assert sources >= {*drafters, "grammar"}


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
        for delta in plain[case].deltas:
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


SILENT = {
    name
    for name in FEATURES
    if name in ("no field but temperature", "cache_salt")
    or name.startswith(("speculation", "prediction"))
}
"""What is seen in no text; those of speculation and predictions in the drafts."""
BESIDE = {"ignore_eos": "logit_bias of the end of a text", "skip_special_tokens": "ignore_eos"}
"""The features whose request is that of another one and one field more."""


@pytest.mark.parametrize("name", [name for name in FEATURES if name not in SILENT])
def test_a_field_shows(name: str, plain: Answers) -> None:
    """What is compared above is not the same text for every field."""
    answers, without = (
        [
            (shown(delta), logprobs_of(delta))
            for index in range(len(PROMPTS))
            for delta in plain[key, "sampled", index].deltas
        ]
        for key in (name, BESIDE.get(name, "no field but temperature"))
    )
    assert answers != without


def test_a_salt_shows_in_what_is_cached(plain: Answers) -> None:
    """Each prompt was run before, and nothing with this salt."""
    for index, prompt in enumerate(PROMPTS):
        salted, other = (
            plain[name, "greedy", index].num_prompt_run for name in ("cache_salt", "echo")
        )
        if len(prompt) > CACHE.block_size:
            assert salted > other
        assert salted == plain["cache_salt", "greedy", index].usage.num_prompt_tokens


def test_texts_are_what_the_fields_say(tokenizer: Any, plain: Answers) -> None:
    """The texts of plain decoding are compared with what each field is said to do."""
    banned = {token for character in FREQUENT for token in tokenizer.encode(character)}
    for index in range(len(PROMPTS)):
        for way in ("greedy", "sampled"):
            (base,) = plain["no field but temperature", way, index].deltas
            (stopped,) = plain["stop_token_ids", way, index].deltas
            ends = [
                i for i, token in enumerate(base.token_ids) if token in (END_TOKEN, *STOP_TOKENS)
            ]
            end = ends[0] + 1 if ends else NUM_TOKENS
            assert stopped.token_ids == base.token_ids[:end]
            (delayed,) = plain["min_tokens", way, index].deltas
            assert len(delayed.token_ids) >= MIN_TOKENS
            assert not {*delayed.token_ids[:MIN_TOKENS]} & {END_TOKEN, *STOP_TOKENS}
            (clean,) = plain["bad_words", way, index].deltas
            assert not {*clean.token_ids} & banned
            (nothing,) = plain["max_tokens of 0, with echo", way, index].deltas
            assert (nothing.text, nothing.finish_reason) == ("", "length")
            assert "".join(record.text for record in nothing.prompt) == PROMPTS[index]
