"""Log-probabilities are those of the model's own law, whatever is drafted, cached or cut."""

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.tiny_configs import VOCAB_SIZE
from tests.workers.decoding import CACHE, GREEDY, PENALISED, SAMPLED, make_prompt
from workers.logprobs import token_logprobs
from workers.model import Model
from workers.sampling import SamplingRow, sample
from workers.sampling_params import SamplingParams
from workers.target import Target
from workers.types import TokenLogprobs, VerifyRequest, VerifyResult

NUM_TOP = 3
TOLERANCE = 1e-4


LawOf = Callable[[Model, Sequence[int]], Tensor]


@pytest.fixture
def law_of(reference: Callable[[Model], PreTrainedModel]) -> LawOf:
    """log softmax after each token, by transformers' own forward.  # [len(tokens), vocab]"""

    def law_of(model: Model, tokens: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = reference(model)(torch.tensor([tokens])).logits[0]
            return logits.log_softmax(-1)

    return law_of


def assert_right(
    found: Sequence[TokenLogprobs], law: Tensor, tokens: Sequence[int], num_top: int = NUM_TOP
) -> None:
    """`law` has a row for each of the tokens."""
    assert len(found) == len(law) == len(tokens)
    for one, row, token in zip(found, law, tokens, strict=True):
        assert one.logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
        assert len(one.top) == num_top
        for (token_id, logprob), highest in zip(one.top, row.topk(num_top).values, strict=True):
            assert logprob == pytest.approx(float(highest), abs=TOLERANCE)
            assert logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)


class TestOfLogits:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_they_are_those_of_log_softmax(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        logits = (5 * torch.randn(6, 50)).to(dtype)
        tokens = [0, 49, 7, 7, 20, 3]
        law = logits.float().log_softmax(-1)
        assert_right(token_logprobs(logits, tokens, num_top=5), law, tokens, num_top=5)
        alone = token_logprobs(logits, tokens, num_top=0)
        assert [one.top for one in alone] == [()] * 6

    def test_of_equals_the_lower_id_comes_first_as_in_the_sampler(self) -> None:
        logits = torch.full((1, 300), -5.0)
        logits[0, [250, 17, 90, 200]] = 3.0
        logits[0, 5] = 2.0
        (found,) = token_logprobs(logits, [5], num_top=5)
        assert [token for token, _ in found.top] == [17, 90, 200, 250, 5]
        row = SamplingRow(params=GREEDY, seed=0, position=0)
        assert sample(logits, [row]) == [17]

    @pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
    def test_the_order_is_that_of_the_scores(self, scale: float) -> None:
        torch.manual_seed(1)
        logits = scale * torch.randn(20, 400)
        logits[:, 3], logits[:, 4] = 0.0, -0.0
        found = token_logprobs(logits, [0] * 20, num_top=400)
        expected = logits.sort(descending=True, stable=True).indices.tolist()
        assert [[token for token, _ in one.top] for one in found] == expected

    def test_there_are_no_more_than_tokens(self) -> None:
        (found,) = token_logprobs(torch.zeros(1, 3), [1], num_top=20)
        assert [token for token, _ in found.top] == [0, 1, 2]

    def test_a_token_without_a_chance_has_none(self) -> None:
        logits = torch.tensor([[0.0, -float("inf")]])
        (found,) = token_logprobs(logits, [1], num_top=2)
        assert found.logprob == -float("inf")
        assert found.top == ((0, 0.0), (1, -float("inf")))


def run(
    target: Target,
    prompt: Sequence[int],
    num_tokens: int,
    drafts: Callable[[list[int]], Sequence[int]],
    sampling: SamplingParams,
) -> tuple[list[int], list[TokenLogprobs]]:
    tokens, found, cached_len = list(prompt), [], 0
    while len(tokens) < len(prompt) + num_tokens:
        request = VerifyRequest(
            seq_id="s",
            base_len=cached_len,
            new_tokens=tuple(tokens[cached_len:]),
            draft_tokens=tuple(drafts(tokens)) if cached_len else (),
            prompt_len=len(prompt),
            sampling=sampling,
            seed=1,
            num_logprobs=NUM_TOP,
        )
        (result,) = target.verify([request])
        assert len(result.logprobs) == len(result.tokens)
        cached_len = len(tokens) + result.num_accepted
        tokens += result.tokens
        found += result.logprobs
    return tokens, found


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "T", "penalty"])
@pytest.mark.parametrize("gamma", [0, 1, 8])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_committed_tokens_have_those_of_a_plain_forward(
    family: str,
    gamma: int,
    sampling: SamplingParams,
    tiny_model: Callable[..., Model],
    law_of: LawOf,
) -> None:
    model, prompt = tiny_model(family), make_prompt(4, 23)
    truth, _ = run(Target(model, CACHE), prompt, 18, lambda _: (), sampling)

    def drafts(tokens: list[int]) -> list[int]:
        """Right, but for every fifth."""
        return [
            (token + (index % 5 == 4)) % VOCAB_SIZE
            for index, token in enumerate(truth[len(tokens) : len(tokens) + gamma], len(tokens))
        ]

    tokens, found = run(Target(model, CACHE), prompt, 18, drafts, sampling)
    assert tokens[: len(truth)] == truth[: len(tokens)]
    law = law_of(model, tokens)
    assert_right(found, law[len(prompt) - 1 : -1], tokens[len(prompt) :])
    if sampling is GREEDY:
        assert all(one.top[0][0] == token for one, token in zip(found, tokens[23:], strict=True))


def prompt_request(prompt: Sequence[int], seq_id: str = "s", base_len: int = 0) -> VerifyRequest:
    return VerifyRequest(
        seq_id=seq_id,
        base_len=base_len,
        new_tokens=tuple(prompt[base_len:]),
        prompt_len=len(prompt),
        sampling=GREEDY,
        num_logprobs=NUM_TOP,
        num_prompt_logprobs=NUM_TOP,
    )


class TestOfPrompts:
    @pytest.mark.parametrize("length", [1, 2, 9, 16, 17, 70])
    def test_a_prompt_in_chunks_has_those_of_a_plain_forward(
        self, length: int, tiny_model: Callable[..., Model], law_of: LawOf
    ) -> None:
        model, prompt = tiny_model("llama"), make_prompt(5, length)
        target = Target(model, CACHE, max_batched_tokens=16)
        (result,) = target.verify([prompt_request(prompt)])
        law = law_of(model, [*prompt, *result.tokens])
        assert_right(result.prompt_logprobs, law[: length - 1], prompt[1:])
        assert_right(result.logprobs, law[length - 1 : -1], result.tokens)

    def test_a_cached_beginning_is_run_again(
        self, tiny_model: Callable[..., Model], law_of: LawOf
    ) -> None:
        model, prompt = tiny_model("llama"), make_prompt(5, 41)
        target = Target(model, CACHE)
        (cold,) = target.verify([prompt_request(prompt)])
        run_before = target.num_tokens_run
        (warm,) = target.verify([prompt_request(prompt, seq_id="again")])
        assert target.num_tokens_run - run_before == len(prompt)
        assert_right(warm.prompt_logprobs, law_of(model, prompt)[:-1], prompt[1:])
        assert warm.tokens == cold.tokens
        other = dataclasses.replace(prompt_request(prompt, "other"), num_prompt_logprobs=None)
        (reused,) = target.verify([other])
        assert target.num_tokens_run - run_before < len(prompt) + 6
        assert (reused.tokens, reused.prompt_logprobs) == (cold.tokens, ())
        target.check_integrity()

    def test_they_are_given_in_a_batch_with_others(
        self, tiny_model: Callable[..., Model], law_of: LawOf
    ) -> None:
        """Rows of logits of prompts stand between those that decide tokens."""
        model = tiny_model("llama")
        prompts = [make_prompt(i, length) for i, length in enumerate([30, 5, 8, 40, 3])]
        requests = [prompt_request(p, str(i)) for i, p in enumerate(prompts)]
        for index in (1, 3):
            requests[index] = dataclasses.replace(requests[index], num_prompt_logprobs=None)
        alone = [Target(model, CACHE).verify([request])[0] for request in requests]
        together = Target(model, CACHE, max_batched_tokens=16).verify(requests)
        assert [result.tokens for result in together] == [result.tokens for result in alone]
        for index, (result, prompt) in enumerate(zip(together, prompts, strict=True)):
            if index in (1, 3):
                assert result.prompt_logprobs == ()
            else:
                assert_right(result.prompt_logprobs, law_of(model, prompt)[:-1], prompt[1:])

    def test_those_that_were_run_are_kept_when_the_rest_is_asked_for_again(
        self, tiny_model: Callable[..., Model], law_of: LawOf
    ) -> None:
        """A caller of a busy worker is told what it has so far, and comes again."""
        model, prompt = tiny_model("llama"), make_prompt(5, 90)
        target = Target(model, CACHE, max_batched_tokens=16)
        found: list[TokenLogprobs] = []
        result = VerifyResult(seq_id="s")
        while not result.tokens:
            base_len = len(found)
            assert target.submit(prompt_request(prompt, base_len=base_len)) == []
            for _ in range(2):
                results, _ = target.step()
                if results:
                    break
            else:
                results = target.report_progress(["s"])
            (result,) = results
            found[base_len:] = result.prompt_logprobs
            if not result.tokens:
                assert result.needs_tokens_from == len(found)
        assert_right(found, law_of(model, prompt)[:-1], prompt[1:])
        target.check_integrity()

    def test_a_later_round_has_none(self, tiny_model: Callable[..., Model]) -> None:
        target, prompt = Target(tiny_model("llama"), CACHE), make_prompt(5, 20)
        (first,) = target.verify([prompt_request(prompt)])
        request = dataclasses.replace(
            prompt_request(prompt),
            base_len=len(prompt),
            new_tokens=first.tokens,
            num_prompt_logprobs=None,
            num_logprobs=None,
        )
        (second,) = target.verify([request])
        assert len(second.tokens) == 1
        assert (second.prompt_logprobs, second.logprobs) == ((), ())


def test_one_that_fails_fails_alone(tiny_model: Callable[..., Model]) -> None:
    model, prompt = tiny_model("llama"), make_prompt(5, 20)
    target = Target(model, CACHE)
    good = prompt_request(prompt, "good")
    bad = dataclasses.replace(prompt_request(prompt, "bad"), num_logprobs=-5)
    worse = dataclasses.replace(prompt_request(prompt, "worse"), num_prompt_logprobs=-5)
    results = target.verify([bad, good, worse])
    assert ["internal error" in result.error for result in results] == [True, False, True]
    assert results[1].tokens == Target(model, CACHE).verify([good])[0].tokens
    assert (target.num_sequences, target.num_waiting) == (1, 0)
    target.check_integrity()
