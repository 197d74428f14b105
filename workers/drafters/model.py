"""The model drafter: a small model that guesses what the target will say."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workers.cpu.packed_linear import has_streams
from workers.drafters.draws import (
    CollectedDrafts,
    Draft,
    Draw,
    allowed_next,
    choose_drafts,
    sampling_row,
)
from workers.grammar_masks import GrammarText
from workers.isolation import decide_each
from workers.kv_cache import CachedSequence
from workers.model import Model, load_model
from workers.model_source import AnyModel
from workers.paged_model import CacheOptions
from workers.quantization import Quantization
from workers.sampling import SamplingRow, sample_with_confidence
from workers.sampling_params import SamplingParams
from workers.scheduler import ScheduledRun
from workers.step_plan import StepPlan
from workers.step_times import DRAFT_SIZES
from workers.step_worker import StepWorker
from workers.types import ProposeRequest, ProposeResult

SMALL_MODEL_BYTES = 8 * 1024**2
"""Size of bf16 weights up to which a model still fits a core's caches in fp32."""


@dataclass(slots=True, kw_only=True, eq=False)
class Drafting(CollectedDrafts):
    """One sequence in a step, and its drafts: none unless its newest committed token is run."""

    run: ScheduledRun[ProposeRequest]
    round_len: int
    """The number of committed tokens when the drafts were asked for."""

    @property
    def sequence(self) -> CachedSequence:
        return self.run.sequence


def load_draft_model(
    name: AnyModel,
    *,
    dtype: str = "auto",
    device: str = "auto",
    quantization: Quantization = "none",
) -> Model:
    """Load a model; a small bf16 one on a CPU without our kernel is run in fp32.

    A bf16 product costs oneDNN about 15 microseconds, however small it is, an fp32 one 3; drafts
    may differ a little, which no text shows.
    """
    model = load_model(name, dtype=dtype, device=device, quantization=quantization)
    is_small_bf16 = model.dtype == torch.bfloat16 and model.num_weight_bytes < SMALL_MODEL_BYTES
    is_slow = model.device.type == "cpu" and not has_streams(torch.bfloat16)
    if dtype == "auto" and is_small_bf16 and is_slow:
        return load_model(name, dtype="float32", device=device, quantization=quantization)
    return model


class ModelDrafter(StepWorker[ProposeRequest, ProposeResult]):
    """Drafts for many sequences at once, k per sequence, with the target's own noise.

    Under rules that compare laws the noise is another, and there are no confidences: nothing may
    decide about a draft that knows which token was drawn, but the rule.

    What it ran beyond the committed tokens, its own drafts, stays cached: `synchronise` keeps what
    the target accepted. After a full acceptance that is one token short, since the last draft was
    never run: the newest two tokens are run then.
    """

    result_type = ProposeResult
    timed_sizes = DRAFT_SIZES

    def __init__(
        self, model: Model, cache: CacheOptions | None = None, *, max_batched_tokens: int = 512
    ) -> None:
        """`max_batched_tokens` bounds how much of a prompt a step catches up on."""
        super().__init__(model, cache or CacheOptions(), max_batched_tokens=max_batched_tokens)

    def propose(self, batch: Sequence[ProposeRequest]) -> list[ProposeResult]:
        """At most k drafts for every sequence of the batch; see `run_batch`."""
        return self.run_batch(batch)

    def _num_drafts(self, request: ProposeRequest, given_len: int) -> int:
        """How many of the drafts asked for a sequence of that length can have."""
        return max(0, min(request.k, self._paged.max_model_len - given_len))

    def _num_draft_slots(self, request: ProposeRequest, given_len: int) -> int:
        """The slots that drafts need: one less than there are, since the last is not run."""
        return max(0, self._num_drafts(request, given_len) - 1)

    def _serve(self, runs: Sequence[ScheduledRun[ProposeRequest]]) -> list[ProposeResult]:
        entries = [self._start(run) for run in runs]
        self._catch_up(entries)
        started, drafting = self._clock(), entries
        while drafting := [entry for entry in drafting if entry.wants_more]:
            self._draft(drafting)
        further_s = self._clock() - started
        answers = []
        for entry in entries:
            if entry.run.is_last and entry.sequence.seq_id in self._backlog:
                with self._isolated(entry.sequence.seq_id):
                    answers.append(replace(self._answer(entry), further_s=further_s))
        return answers

    def _start(self, run: ScheduledRun[ProposeRequest]) -> Drafting:
        request, given_len = run.item.request, run.sequence.cached_len + len(run.tokens)
        num_drafts = self._num_drafts(request, given_len) if run.is_last else 0
        return Drafting(
            run=run,
            k=min(num_drafts, run.num_draft_slots + 1),
            stop_below=request.stop_below,
            round_len=request.base_len + len(request.new_tokens),
        )

    def _catch_up(self, entries: Sequence[Drafting]) -> None:
        """Run the given tokens that the cache lacks; the newest decides the first draft."""
        plan = StepPlan()
        for entry in entries:
            plan.add(
                entry.sequence,
                entry.run.tokens,
                num_logits=int(entry.k > 0),
                committed_len=entry.run.committed_len,
            )
        logits = self._paged.run(plan)
        for entry in entries:
            entry.run.record(entry.run.tokens)
        self._sample_drafts([entry for entry in entries if entry.k > 0], logits)

    def _draft(self, drafting: Sequence[Drafting]) -> None:
        """Run each newest draft to get the next one."""
        plan = StepPlan()
        for entry in drafting:
            plan.add(
                entry.sequence,
                [entry.drafts[-1].token],
                num_logits=1,
                committed_len=entry.run.committed_len,
            )
        logits = self._paged.run(plan)
        for entry in drafting:
            entry.run.record([entry.drafts[-1].token])
        self._sample_drafts(drafting, logits)

    def _sample_drafts(self, drafting: Sequence[Drafting], logits: Tensor) -> None:
        """Add a draft to each; those for which none can be had end.  # logits [drafting, vocab]"""
        drafts = decide_each(
            self._choose,
            drafting,
            logits,
            num_rows=[1] * len(drafting),
            isolated=lambda entry: self._isolated(entry.sequence.seq_id),
        )
        for entry, draft in zip(drafting, drafts, strict=True):
            entry.has_ended = True  # if this fails
            with self._isolated(entry.sequence.seq_id):
                self._add(entry, draft)
                entry.has_ended = draft is None

    def _choose(self, drafting: Sequence[Drafting], logits: Tensor) -> list[Draft | None]:
        """A draft for each; None where the scores decide none.  # logits [drafting, vocab]"""
        draws = [
            Draw(
                row=self._sampling_row(entry),
                round_len=entry.round_len,
                tells_law=self._tells_law(entry.run.item.request),
            )
            for entry in drafting
        ]
        return choose_drafts(draws, self._scores(logits))

    def _add(self, entry: Drafting, draft: Draft | None) -> None:
        """Take what was sampled as the entry's next draft; None ends drafting."""
        entry.add(draft)

    def _tells_law(self, request: ProposeRequest) -> bool:
        """Whether drafts are drawn from a law that is told, not chosen as the target would."""
        return request.rule != "coupled"

    def _scores(self, logits: Tensor) -> Tensor:
        """The logits of all tokens that may be drafted.  # [num_rows, vocab]"""
        return logits

    def _sampling_row(self, entry: Drafting) -> SamplingRow:
        return sampling_row(entry.run.item.request, entry.sequence.tokens, self._allowed(entry))

    def _allowed(self, entry: Drafting) -> Tensor | None:
        """What the grammar allows next; see `allowed_next`."""
        return allowed_next(self._grammars, self._text_of(entry), entry.run.item.request)

    def _text_of(self, entry: Drafting) -> GrammarText:
        """The tokens that a grammar is about."""
        return entry.sequence

    def _answer(self, entry: Drafting) -> ProposeResult:
        self._backlog.finish(entry.run.item)
        return ProposeResult(
            seq_id=entry.sequence.seq_id,
            draft_tokens=entry.tokens,
            confidences=entry.confidences,
            law=entry.laws,
        )

    def _decide(self, logits: Tensor) -> None:
        row = SamplingRow(params=SamplingParams(temperature=0.0), seed=0, position=0)
        sample_with_confidence(self._scores(logits), [row] * len(logits))
