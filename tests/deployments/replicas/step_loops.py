"""A step loop over a tiny target, and calls of it."""

from collections.abc import Sequence

from deployments.replicas.step_loop import StepLoop
from tests.fakes import answer_of
from workers.sampling_params import SamplingParams
from workers.types import VerifyRequest, VerifyResult

Loop = StepLoop[VerifyRequest, VerifyResult]
GREEDY = SamplingParams(temperature=0.0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_request(
    seq_id: str, tokens: Sequence[int] = (5, 6, 7), base_len: int = 0
) -> VerifyRequest:
    return VerifyRequest(
        seq_id=seq_id, base_len=base_len, new_tokens=tuple(tokens), prompt_len=1, sampling=GREEDY
    )


async def run(loop: Loop, batch: Sequence[VerifyRequest]) -> tuple[VerifyResult, ...]:
    return (await answer_of(loop, batch)).results
