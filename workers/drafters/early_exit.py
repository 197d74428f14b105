"""Early exit: the target drafts for the next round, by its first layers.

It does so once it has decided a sequence's tokens, and the drafts ride back with its answer. What
the first layers cache for the newest token and its drafts is what the whole model will write in the
same slots when it verifies them, so nothing is kept of it: the sequence's cache ends as before.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from workers.drafters.draws import Draft, Draw, allowed_next, choose_drafts, sampling_row
from workers.errors import KVCacheExhaustedError
from workers.grammar_masks import GrammarMasks
from workers.kv_cache import CachedSequence, SequenceTable
from workers.paged_model import PagedModel
from workers.step_plan import StepPlan
from workers.types import DraftTokens, VerifyRequest

logger = logging.getLogger(__name__)

SOURCE = "early_exit"


@dataclass(slots=True, kw_only=True, eq=False)
class EarlyDrafting:
    """One sequence whose next token is decided and not run, and the drafts that it has so far."""

    sequence: CachedSequence
    """The sequence, whose tokens grow by what is run."""
    request: VerifyRequest
    newest: int
    """The newest token, which is decided and not run yet."""
    round_len: int = field(init=False)
    """The number of committed tokens, `newest` included."""
    k: int = 0
    """The number of drafts to make, for all of which there is room."""
    drafts: list[Draft] = field(default_factory=list)
    has_ended: bool = False
    """Whether no further draft can be had."""

    def __post_init__(self) -> None:
        self.round_len = self.sequence.cached_len + 1

    @property
    def wants_more(self) -> bool:
        confidences = (1.0 if d.confidence is None else d.confidence for d in self.drafts)
        is_sure = math.prod(confidences) >= self.request.next_stop_below
        return is_sure and len(self.drafts) < self.k and not self.has_ended

    @property
    def to_run(self) -> int:
        """The token to run next, whose logits decide the next draft."""
        return self.drafts[-1].token if self.drafts else self.newest

    @property
    def draft_tokens(self) -> DraftTokens:
        return DraftTokens(
            tokens=tuple(draft.token for draft in self.drafts),
            confidences=tuple(d.confidence for d in self.drafts if d.confidence is not None),
            law=tuple(draft.law for draft in self.drafts if draft.law is not None),
            source=SOURCE,
        )


class EarlyExitDrafter:
    """Drafts for many sequences of a target at once, as a ModelDrafter does.

    Whatever goes wrong with one of them ends its drafts and nothing else; what the forward pass
    raises leaves the target unusable, as in any step.
    """

    def __init__(self, paged: PagedModel, sequences: SequenceTable, grammars: GrammarMasks) -> None:
        """The model, the sequences and the grammars are the target's own."""
        self._paged = paged
        self._sequences = sequences
        self._grammars = grammars

    def draft(self, asked: Sequence[EarlyDrafting]) -> None:
        """Add at most `next_k` drafts to each sequence, whose cache ends where it did."""
        cached_lens = [entry.sequence.cached_len for entry in asked]
        for entry in asked:
            entry.k = self._make_room(entry)
        while drafting := [entry for entry in asked if entry.wants_more]:
            self._step(drafting)
        for entry, cached_len in zip(asked, cached_lens, strict=True):
            self._sequences.truncate(entry.sequence, cached_len)

    def _make_room(self, entry: EarlyDrafting) -> int:
        """Reserve free room for drafts; returns for how many. No sequence gives way to drafts."""
        cached_len = entry.sequence.cached_len
        most = min(entry.request.next_k, self._paged.max_model_len - cached_len - 1)
        for k in range(most, 0, -1):
            try:
                self._sequences.reserve(entry.sequence, cached_len + k)
            except KVCacheExhaustedError:
                continue
            return k
        return 0

    def _step(self, drafting: Sequence[EarlyDrafting]) -> None:
        plan = StepPlan(is_early=True)
        for entry in drafting:
            tokens = (entry.to_run,)
            plan.add(entry.sequence, tokens, num_logits=1, committed_len=entry.round_len)
        logits = self._paged.run(plan, is_counted=False)  # [len(drafting), vocab]
        for entry in drafting:
            entry.sequence.tokens.append(entry.to_run)
        try:
            self._sample(drafting, logits)
        except Exception:  # of one of them: each by itself shows whose
            for row, entry in enumerate(drafting):
                try:
                    self._sample([entry], logits[row : row + 1])
                except Exception:
                    logger.exception("%s goes on without drafts", entry.sequence.seq_id)
                    entry.has_ended = True

    def _sample(self, drafting: Sequence[EarlyDrafting], logits: Tensor) -> None:
        """Add a draft to each; those whose scores decide none end.  # logits [drafting, vocab]"""
        draws = [
            Draw(
                row=sampling_row(entry.request, entry.sequence.tokens, self._allowed(entry)),
                round_len=entry.round_len,
                tells_law=entry.request.rule != "coupled",
            )
            for entry in drafting
        ]
        for entry, draft in zip(drafting, choose_drafts(draws, logits), strict=True):
            if draft is None:
                entry.has_ended = True
            else:
                entry.drafts.append(draft)

    def _allowed(self, entry: EarlyDrafting) -> Tensor | None:
        return allowed_next(self._grammars, entry.sequence, entry.request)
