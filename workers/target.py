"""The target: verifies drafts of many sequences in one forward, prefills included."""

from collections.abc import Sequence

from torch import Tensor

from workers.errors import GenerationFailedError, InvalidRequestError
from workers.model import Model
from workers.paged_model import CacheOptions, Ranks
from workers.sampling import NO_TOKEN, SamplingRow
from workers.scheduler import ScheduledRun
from workers.step_plan import StepPlan
from workers.step_times import VERIFY_SIZES
from workers.step_worker import StepWorker
from workers.types import SamplingParams, VerifyRequest, VerifyResult
from workers.verification import CoupledRule, JudgedRun, Verdict, VerificationRule

Run = ScheduledRun[VerifyRequest]


class Target(StepWorker[VerifyRequest, VerifyResult]):
    """A model that decides every token."""

    result_type = VerifyResult
    timed_sizes = VERIFY_SIZES

    def __init__(
        self,
        model: Model,
        cache: CacheOptions | None = None,
        *,
        max_batched_tokens: int = 256,
        ranks: Ranks | None = None,
        rule: VerificationRule | None = None,
    ) -> None:
        """Allocate the cache; raises ConfigError if it cannot be as `cache` says.

        Args:
            max_batched_tokens: bounds the prefill in a step, hence how long a step can take.
            ranks: those that hold the other shards of the model.
            rule: how drafts are judged; by default CoupledRule.
        """
        super().__init__(
            model, cache or CacheOptions(), max_batched_tokens=max_batched_tokens, ranks=ranks
        )
        self._rule: VerificationRule = rule or CoupledRule()

    def verify(self, batch: Sequence[VerifyRequest]) -> list[VerifyResult]:
        """The target's own tokens for every sequence of the batch; see `run_batch`."""
        return self.run_batch(batch)

    def _check(self, request: VerifyRequest) -> None:
        """Raise InvalidRequestError for unknown tokens, and for drafts that nobody here makes."""
        super()._check(request)
        if request.next_k > 0:
            raise InvalidRequestError(
                f"next_k is {request.next_k}, but this target makes no drafts; it must be 0"
            )

    def _num_draft_slots(self, request: VerifyRequest, given_len: int) -> int:
        """Drafts up to the first that is no token of ours, or that would pass the end."""
        usable = request.draft_tokens[: max(0, self._paged.max_model_len - given_len)]
        vocab_size = self._paged.model.vocab_size
        return next(
            (i for i, token in enumerate(usable) if not 0 <= token < vocab_size), len(usable)
        )

    def _serve(self, runs: Sequence[Run]) -> list[VerifyResult]:
        logits = self._run(runs)
        results = []
        for run, verdict in self._judge([run for run in runs if run.is_last], logits):
            with self._isolated(run.sequence.seq_id):
                results.append(self._answer(run, verdict))
        return results

    def _run(self, runs: Sequence[Run]) -> Tensor:
        """Run given tokens and drafts; logits after the newest given token and after each draft.

        # [sum(gamma + 1 of those that are last), vocab]
        """
        plan = StepPlan()
        for run in runs:
            num_logits = 1 + run.num_draft_slots if run.is_last else 0
            plan.add(run.sequence, run.tokens + _drafts(run), num_logits=num_logits)
        logits = self._forward(plan)
        for run in runs:
            run.record(run.tokens + _drafts(run))
        return logits

    def _judge(self, runs: Sequence[Run], logits: Tensor) -> list[tuple[Run, Verdict]]:
        """A verdict on the drafts of each run; a run that fails is left out."""
        if not runs:
            return []
        try:
            judged = [_judged_run(run) for run in runs]
            return list(zip(runs, self._rule.judge(logits, judged), strict=True))
        except Exception:  # of one of them: each by itself shows whose
            verdicts = []
            num_rows = [1 + run.num_draft_slots for run in runs]
            for run, rows in zip(runs, logits.split(num_rows), strict=True):
                with self._isolated(run.sequence.seq_id):
                    verdicts.append((run, self._rule.judge(rows, [_judged_run(run)])[0]))
            return verdicts

    def _answer(self, run: Run, verdict: Verdict) -> VerifyResult:
        """Roll back the drafts that were rejected.

        Raises GenerationFailedError where the model's scores decide no token.
        """
        sequence = run.sequence
        accepted_len = sequence.cached_len - run.num_draft_slots + verdict.num_accepted
        if verdict.tokens[-1] == NO_TOKEN:
            raise GenerationFailedError(
                f"the scores of {self._paged.model.name!r} are not finite numbers at position "
                f"{accepted_len}, so no token can be chosen; try another prompt, other sampling "
                "parameters or dtype=float32"
            )
        self._sequences.truncate(sequence, accepted_len)
        self._backlog.finish(run.item)
        return VerifyResult(
            seq_id=sequence.seq_id,
            tokens=verdict.tokens,
            num_accepted=verdict.num_accepted,
            num_tested=verdict.num_tested,
        )

    def _decide(self, logits: Tensor) -> None:
        row = SamplingRow(params=SamplingParams(temperature=0.0), seed=0, position=0)
        run = JudgedRun(draft_tokens=(0,) * (len(logits) - 1), rows=(row,) * len(logits))
        self._rule.judge(logits, [run])


def _drafts(run: Run) -> tuple[int, ...]:
    """The drafts that the step verifies.  # [gamma]"""
    return run.item.request.draft_tokens[: run.num_draft_slots]


def _judged_run(run: Run) -> JudgedRun:
    """Once the run's tokens are cached: what decides the token after each that has logits."""
    request, tokens = run.item.request, run.sequence.tokens
    first_position = len(tokens) - run.num_draft_slots
    rows = tuple(
        SamplingRow(
            params=request.sampling,
            seed=request.seed,
            position=position,
            history=tokens[:position] if request.sampling.has_penalties else (),
            prompt_len=request.prompt_len,
        )
        for position in range(first_position, len(tokens) + 1)
    )
    return JudgedRun(draft_tokens=_drafts(run), rows=rows)
