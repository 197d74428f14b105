"""The model drafter: a small model that guesses what the target will say."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.backlog import WorkItem
from workers.cpu.packed_linear import has_streams
from workers.kv_cache import CachedSequence
from workers.model import Model, load_model
from workers.paged_model import CacheOptions, Run
from workers.sampling import NO_TOKEN, SamplingRow, sample_with_confidence
from workers.step_worker import StepWorker
from workers.types import ProposeRequest, ProposeResult

# Of bf16 weights: in fp32 they still fit a core's caches.
SMALL_MODEL_BYTES = 8 * 1024**2
# Of a confidence; more would only lengthen messages.
CONFIDENCE_DIGITS = 5


@dataclass(slots=True, kw_only=True)
class _Drafting:
    """One sequence in a step."""

    item: WorkItem[ProposeRequest]
    num_committed: int
    """Of the item's remaining tokens, those run in this step."""
    k: int
    """Drafts to make; 0 unless the step runs the newest committed token."""
    is_last: bool
    """Whether the item is answered after this step."""
    draft_tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    has_ended: bool = False
    """Whether the model's scores decided no token, so that drafting cannot go on."""

    @property
    def wants_more(self) -> bool:
        is_sure = math.prod(self.confidences) >= self.item.request.stop_below
        return is_sure and len(self.draft_tokens) < self.k and not self.has_ended

    @property
    def sequence(self) -> CachedSequence:
        return self.item.sequence


def load_draft_model(name: str, *, dtype: str = "auto", device: str = "auto") -> Model:
    """As load_model, but a small bf16 model on a CPU without our kernel is run in fp32.

    A bf16 product costs oneDNN about 15 microseconds, however small it is, an fp32 one 3; drafts
    may differ a little, which no text shows.
    """
    model = load_model(name, dtype=dtype, device=device)
    is_small_bf16 = model.dtype == torch.bfloat16 and model.num_weight_bytes < SMALL_MODEL_BYTES
    is_slow = model.device.type == "cpu" and not has_streams(torch.bfloat16)
    if dtype == "auto" and is_small_bf16 and is_slow:
        return load_model(name, dtype="float32", device=device)
    return model


class ModelDrafter(StepWorker[ProposeRequest, ProposeResult]):
    """Drafts for many sequences at once, k per sequence, with the target's own noise.

    What it ran beyond the committed tokens, its own drafts, stays cached: `synchronise` keeps what
    the target accepted. After a full acceptance that is one token short, since the last draft was
    never run: the newest two tokens are run then.
    """

    def __init__(
        self, model: Model, cache: CacheOptions | None = None, *, max_batched_tokens: int = 512
    ) -> None:
        """`max_batched_tokens` bounds how much of a prompt a step catches up on."""
        super().__init__(model, cache or CacheOptions(), max_batched_tokens=max_batched_tokens)

    def propose(self, batch: Sequence[ProposeRequest]) -> list[ProposeResult]:
        """At most k drafts for every sequence of the batch; see `run_batch`."""
        return self.run_batch(batch)

    def unanswered(
        self,
        seq_id: str,
        *,
        needs_tokens_from: int | None = None,
        is_released: bool = False,
        error: str = "",
    ) -> ProposeResult:
        return ProposeResult(
            seq_id=seq_id,
            needs_tokens_from=needs_tokens_from,
            is_released=is_released,
            error=error,
        )

    def _check(self, request: ProposeRequest) -> None:
        """Refuse nothing: the target knows its tokens, and those unknown here are stood in for."""

    def _step(self) -> tuple[list[ProposeResult], bool]:
        plan = self._plan()
        if not plan:
            return [], False
        self._catch_up(plan)
        drafting = plan
        while drafting := [entry for entry in drafting if entry.wants_more]:
            self._draft(drafting)
        answers = []
        for entry in plan:
            if entry.is_last and entry.sequence.seq_id in self._backlog:
                with self._alone(entry.sequence.seq_id):
                    answers.append(self._answer(entry))
        return answers, True

    def _plan(self) -> list[_Drafting]:
        """Every short item, then prompts up to the token budget."""
        plan: list[_Drafting] = []
        budget = self._max_batched_tokens
        for item in self._backlog.in_turn():
            if item.sequence.seq_id not in self._backlog:  # preempted for an earlier one
                continue
            num_committed = len(item.remaining)
            if item.is_prefill:
                num_committed = min(num_committed, budget)
                if num_committed <= 0:
                    break
            entry = None
            with self._alone(item.sequence.seq_id):
                entry = self._make_room(item, num_committed, [e.sequence for e in plan])
            if entry is not None:
                plan.append(entry)
                budget -= num_committed
        return plan

    def _make_room(
        self, item: WorkItem[ProposeRequest], num_committed: int, planned: list[CachedSequence]
    ) -> _Drafting | None:
        committed_len = item.sequence.cached_len + num_committed
        is_last = num_committed == len(item.remaining)
        k = item.request.k if is_last else 0
        # the last draft is not run, so it needs no slot
        k = max(0, min(k, self._paged.max_model_len - committed_len))
        reserved_len = self._backlog.make_room(
            item.sequence,
            wanted=committed_len + max(0, k - 1),
            least=committed_len,
            keep=planned,
        )
        if reserved_len is None:
            return None
        return _Drafting(
            item=item,
            num_committed=num_committed,
            k=min(k, reserved_len - committed_len + 1),
            is_last=is_last,
        )

    def _catch_up(self, plan: list[_Drafting]) -> None:
        """Run the committed tokens the cache lacks; the newest decides the first draft."""
        runs = [
            Run(
                sequence=entry.sequence,
                tokens=entry.item.remaining[: entry.num_committed],
                num_logits=int(entry.k > 0),
            )
            for entry in plan
        ]
        self._run_and_sample(runs, [entry for entry in plan if entry.k > 0])
        for entry in plan:
            if not entry.is_last:
                entry.item.remaining = entry.item.remaining[entry.num_committed :]

    def _draft(self, drafting: list[_Drafting]) -> None:
        """Run each newest draft to get the next one."""
        runs = [
            Run(sequence=entry.sequence, tokens=entry.draft_tokens[-1:], num_logits=1)
            for entry in drafting
        ]
        self._run_and_sample(runs, drafting)

    def _run_and_sample(self, runs: list[Run], drafting: list[_Drafting]) -> None:
        logits = self._paged.run(runs)
        if not drafting:
            return
        try:
            self._sample(drafting, logits)
        except Exception:  # of one of them: each by itself shows whose
            for row, entry in enumerate(drafting):
                has_failed = True
                with self._alone(entry.sequence.seq_id):
                    self._sample([entry], logits[row : row + 1])
                    has_failed = False
                entry.has_ended |= has_failed

    def _sample(self, drafting: list[_Drafting], logits: Tensor) -> None:
        """Add a draft to each; those whose scores decide none end.  # logits [drafting, vocab]"""
        tokens, confidences = sample_with_confidence(logits, [_sampling_row(e) for e in drafting])
        for entry, token, confidence in zip(drafting, tokens, confidences, strict=True):
            if token == NO_TOKEN or not math.isfinite(confidence):
                entry.has_ended = True
                continue
            entry.draft_tokens.append(token)
            entry.confidences.append(round(confidence, CONFIDENCE_DIGITS))

    def _answer(self, entry: _Drafting) -> ProposeResult:
        self._backlog.finish(entry.item)
        return ProposeResult(
            seq_id=entry.sequence.seq_id,
            draft_tokens=tuple(entry.draft_tokens),
            confidences=tuple(entry.confidences),
        )


def _sampling_row(entry: _Drafting) -> SamplingRow:
    request, tokens = entry.item.request, entry.sequence.tokens
    return SamplingRow(
        params=request.sampling,
        seed=request.seed,
        position=len(tokens),
        history=tokens if request.sampling.has_penalties else (),
        prompt_len=request.prompt_len,
    )
