"""Early exit: the target drafts for the next round, by its first layers.

It does so once it has decided a sequence's tokens, and the drafts ride back with its answer. What
the first layers cache for the newest token and its drafts is what the whole model will write in the
same slots when it verifies them, so nothing is kept of it: the sequence's cache ends as before.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from workers.drafters.draws import (
    CollectedDrafts,
    Draft,
    Draw,
    allowed_next,
    choose_drafts,
    sampling_row,
)
from workers.errors import KVCacheExhaustedError
from workers.grammar_masks import GrammarMasks
from workers.isolation import DeviceLost, decide_each
from workers.kv_cache import CachedSequence, SequenceTable
from workers.paged_model import PagedModel
from workers.step_plan import StepPlan
from workers.types import DraftTokens, VerifyRequest

logger = logging.getLogger(__name__)

SOURCE = "early_exit"


@dataclass(slots=True, kw_only=True, eq=False)
class EarlyDrafting(CollectedDrafts):
    """One sequence whose next token is decided and not run, and its drafts so far: for as many as
    are made there is room."""

    sequence: CachedSequence
    """The sequence, whose tokens grow by what is run."""
    request: VerifyRequest
    newest: int
    """The newest token, which is decided and not run yet."""
    round_len: int = field(init=False)
    """The number of committed tokens, `newest` included."""

    def __post_init__(self) -> None:
        self.round_len = self.sequence.cached_len + 1

    @property
    def to_run(self) -> int:
        """The token to run next, whose logits decide the next draft."""
        return self.drafts[-1].token if self.drafts else self.newest

    @property
    def draft_tokens(self) -> DraftTokens:
        return DraftTokens(
            tokens=self.tokens, confidences=self.confidences, law=self.laws, source=SOURCE
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
        drafts = decide_each(
            self._choose, drafting, logits, num_rows=[1] * len(drafting), isolated=_isolated
        )
        for entry, draft in zip(drafting, drafts, strict=True):
            entry.add(draft)

    def _choose(self, drafting: Sequence[EarlyDrafting], logits: Tensor) -> list[Draft | None]:
        """A draft for each; None where the scores decide none.  # logits [drafting, vocab]"""
        draws = [
            Draw(
                row=sampling_row(entry.request, entry.sequence.tokens, self._allowed(entry)),
                round_len=entry.round_len,
                tells_law=entry.request.rule != "coupled",
            )
            for entry in drafting
        ]
        return choose_drafts(draws, logits)

    def _allowed(self, entry: EarlyDrafting) -> Tensor | None:
        return allowed_next(self._grammars, entry.sequence, entry.request)


@contextmanager
def _isolated(entry: EarlyDrafting) -> Iterator[None]:
    """Let whatever is raised within, but `DeviceLost`, end the drafts of this sequence only."""
    try:
        yield
    except DeviceLost:
        raise
    except Exception:
        logger.exception("%s goes on without drafts", entry.sequence.seq_id)
