"""The target: verifies drafts of many sequences in one forward, prefills included."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from workers.backlog import WorkItem
from workers.errors import GenerationFailedError
from workers.kv_cache import CachedSequence
from workers.model import Model
from workers.paged_forward import Ranks
from workers.paged_model import CacheOptions, Run
from workers.sampling import NO_TOKEN, SamplingRow, sample
from workers.step_worker import StepWorker
from workers.types import VerifyRequest, VerifyResult
from workers.verification import judge

# However many verifications fill a step, a prefill advances by this much.
MIN_PREFILL_CHUNK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlannedRun:
    item: WorkItem[VerifyRequest]
    num_committed: int
    """Of the item's remaining tokens, those run in this step."""
    draft_tokens: tuple[int, ...]
    is_last: bool
    """Whether the item is answered after this step."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.item.remaining[: self.num_committed] + self.draft_tokens

    @property
    def num_logits(self) -> int:
        return 1 + len(self.draft_tokens) if self.is_last else 0


class Target(StepWorker[VerifyRequest, VerifyResult]):
    """A model that decides every token."""

    def __init__(
        self,
        model: Model,
        cache: CacheOptions | None = None,
        *,
        max_batched_tokens: int = 256,
        ranks: Ranks | None = None,
    ) -> None:
        """Allocate the cache; raises ConfigError if it cannot be as `cache` says.

        Args:
            max_batched_tokens: bounds the prefill in a step, hence how long a step can take.
            ranks: those that hold the other shards of the model.
        """
        super().__init__(
            model, cache or CacheOptions(), max_batched_tokens=max_batched_tokens, ranks=ranks
        )

    def verify(self, batch: Sequence[VerifyRequest]) -> list[VerifyResult]:
        """The target's own tokens for every sequence of the batch; see `run_batch`."""
        return self.run_batch(batch)

    def _step(self) -> tuple[list[VerifyResult], bool]:
        plan = self._plan()
        return (self._run(plan), True) if plan else ([], False)

    def unanswered(
        self,
        seq_id: str,
        *,
        needs_tokens_from: int | None = None,
        is_released: bool = False,
        error: str = "",
    ) -> VerifyResult:
        return VerifyResult(
            seq_id=seq_id,
            needs_tokens_from=needs_tokens_from,
            is_released=is_released,
            error=error,
        )

    def _plan(self) -> list[_PlannedRun]:
        """What to run: every short item, then prefills up to the token budget."""
        plan: list[_PlannedRun] = []
        planned: list[CachedSequence] = []
        num_tokens, num_prefills = 0, 0
        for item in self._backlog.in_turn():
            if item.sequence.seq_id not in self._backlog:  # preempted for an earlier one
                continue
            num_committed = len(item.remaining)
            if item.is_prefill:
                budget = self._max_batched_tokens - num_tokens
                if num_prefills == 0:
                    budget = max(budget, MIN_PREFILL_CHUNK)
                num_committed = min(num_committed, budget)
                if num_committed <= 0:
                    break
            run = None
            with self._alone(item.sequence.seq_id):
                run = self._make_room(item, num_committed, planned)
            if run is None:
                continue
            plan.append(run)
            planned.append(item.sequence)
            num_tokens += len(run.tokens)
            num_prefills += item.is_prefill
        return plan

    def _make_room(
        self, item: WorkItem[VerifyRequest], num_committed: int, planned: list[CachedSequence]
    ) -> _PlannedRun | None:
        is_last = num_committed == len(item.remaining)
        committed_len = item.sequence.cached_len + num_committed
        drafts = self._usable_drafts(item.request, committed_len) if is_last else ()
        reserved_len = self._backlog.make_room(
            item.sequence, wanted=committed_len + len(drafts), least=committed_len, keep=planned
        )
        if reserved_len is None:
            return None
        return _PlannedRun(
            item=item,
            num_committed=num_committed,
            draft_tokens=drafts[: reserved_len - committed_len],
            is_last=is_last,
        )

    def _usable_drafts(self, request: VerifyRequest, committed_len: int) -> tuple[int, ...]:
        """The drafts up to the first that is no token of ours, or that would pass the end."""
        usable = request.draft_tokens[: max(0, self._paged.max_model_len - committed_len)]
        for index, token in enumerate(usable):
            if not 0 <= token < self._paged.model.vocab_size:
                return usable[:index]
        return usable

    def _run(self, plan: list[_PlannedRun]) -> list[VerifyResult]:
        logits = self._paged.run(
            [
                Run(sequence=run.item.sequence, tokens=run.tokens, num_logits=run.num_logits)
                for run in plan
            ]
        )
        for run in plan:
            if not run.is_last:
                run.item.remaining = run.item.remaining[run.num_committed :]
        results = []
        for run, target_tokens in self._sample([run for run in plan if run.is_last], logits):
            with self._alone(run.item.sequence.seq_id):
                results.append(self._answer(run, target_tokens))
        return results

    def _sample(
        self, runs: list[_PlannedRun], logits: Tensor
    ) -> list[tuple[_PlannedRun, list[int]]]:
        """The target's own token at each position of each run; a run that fails is left out.

        Shapes: logits [sum(num_logits), vocab], the runs' rows one after the other.
        """
        if not runs:
            return []
        try:
            tokens = iter(sample(logits, [row for run in runs for row in _sampling_rows(run)]))
            return [(run, [next(tokens) for _ in range(run.num_logits)]) for run in runs]
        except Exception:  # of one of them: each by itself shows whose
            sampled = []
            for run, rows in zip(runs, logits.split([run.num_logits for run in runs]), strict=True):
                with self._alone(run.item.sequence.seq_id):
                    sampled.append((run, sample(rows, _sampling_rows(run))))
            return sampled

    def _answer(self, run: _PlannedRun, target_tokens: list[int]) -> VerifyResult:
        """Judge the drafts and roll back those that were rejected.

        Raises GenerationFailedError where the model's scores decide no token.
        """
        verdict = judge(run.draft_tokens, target_tokens)
        sequence = run.item.sequence
        if verdict.tokens[-1] == NO_TOKEN:
            raise GenerationFailedError(
                f"the scores of {self._paged.model.name!r} are not finite numbers at position "
                f"{sequence.cached_len - len(run.draft_tokens) + verdict.num_accepted}, so no "
                "token can be chosen; try another prompt, other sampling parameters or "
                "dtype=float32"
            )
        committed_len = sequence.cached_len - len(run.draft_tokens)
        self._paged.sequences.truncate(sequence, committed_len + verdict.num_accepted)
        self._backlog.finish(run.item)
        return VerifyResult(
            seq_id=sequence.seq_id,
            tokens=verdict.tokens,
            num_accepted=verdict.num_accepted,
            num_tested=verdict.num_tested,
        )


def _sampling_rows(run: _PlannedRun) -> list[SamplingRow]:
    """One row per wanted logits: after the newest committed token and after each draft."""
    request, tokens = run.item.request, run.item.sequence.tokens
    first_position = len(tokens) - len(run.draft_tokens)
    return [
        SamplingRow(
            params=request.sampling,
            seed=request.seed,
            position=position,
            history=tokens[:position] if request.sampling.has_penalties else (),
            prompt_len=request.prompt_len,
        )
        for position in range(first_position, len(tokens) + 1)
    ]
