"""How tokens are chosen is said once for a sequence, and kept by the workers that cache it."""

from collections.abc import Sequence

import pytest

from tests.deployments.loops import CACHE, Models, make_params, model_drafts, run_all, running_loop
from workers.sampling_params import AS_BEFORE, SamplingParams
from workers.target import Target
from workers.types import VerifyRequest

PROMPT = (5, 6, 7, 8, 9)
BIASED = SamplingParams(temperature=0.9, logit_bias=tuple((token, 1.5) for token in range(3, 40)))


@pytest.mark.parametrize("lost_after", [None, 5])
async def test_they_go_with_the_first_round_alone(models: Models, lost_after: int | None) -> None:
    """And with that to another worker, where the first one is lost."""
    params = [make_params(seed, sampling=BIASED) for seed in range(3)]
    async with running_loop(models, gamma=0) as (loop, _, _):
        plain = await run_all(loop, params, concurrency=1)
    drafts = model_drafts(models)
    async with running_loop(models, drafts=drafts) as (loop, targets, _):

        def lose() -> None:
            if len(targets.calls) == lost_after:
                targets.start_replica()
                targets.kill("replica-0")

        targets.before_call = lose
        streams = await run_all(loop, params, concurrency=3)
        asked = [request for call in (*targets.calls, *drafts.calls) for request in call]
    assert [stream.token_ids for stream in streams] == [stream.token_ids for stream in plain]
    assert {request.sampling for request in asked if request.base_len == 0} == {BIASED}
    assert {request.sampling for request in asked if request.base_len > 0} == {AS_BEFORE}


def test_a_worker_that_was_never_told_asks_for_all(models: Models) -> None:
    target = Target(models.target, CACHE)

    def ask(sampling: SamplingParams, output: Sequence[int] = ()) -> tuple[int | None, ...]:
        (result,) = target.verify(
            [
                VerifyRequest(
                    seq_id="s",
                    base_len=len(PROMPT) if output else 0,
                    new_tokens=tuple(output) or PROMPT,
                    prompt_len=len(PROMPT),
                    sampling=sampling,
                    seed=4,
                )
            ]
        )
        return result.needs_tokens_from, *result.tokens

    assert ask(AS_BEFORE) == (0,)
    _, *first = ask(BIASED)
    second = ask(BIASED, first)
    assert ask(AS_BEFORE, first) == second
    assert ask(SamplingParams(temperature=0.0), first) != second
