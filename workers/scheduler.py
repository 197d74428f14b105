"""What of the backlog the next step runs: one rule for target and drafter.

Every short request is served whole; prefills then share what is left of the step's token budget,
by the turns of those whose they are.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, TypeVar

from workers.backlog import Backlog, WorkItem
from workers.kv_cache import CachedSequence
from workers.types import WorkRequest

MIN_PREFILL_CHUNK = 16
"""Tokens by which a prefill advances, however many short requests fill a step."""

RequestT = TypeVar("RequestT", bound=WorkRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRun(Generic[RequestT]):
    """What a step runs of one sequence."""

    item: WorkItem[RequestT]
    tokens: tuple[int, ...]
    """The first of the item's remaining tokens."""
    is_last: bool
    """Whether these are all of them, so that the item is answered after this step."""
    num_draft_slots: int
    """Cache slots that are reserved behind `tokens` for drafts; 0 unless `is_last`."""

    @property
    def sequence(self) -> CachedSequence:
        return self.item.sequence

    @property
    def committed_len(self) -> int:
        """The length of the sequence without drafts and assumed tokens."""
        return self.item.request.base_len + len(self.item.request.new_tokens)

    def record(self, tokens: Sequence[int]) -> None:
        """Note what the step has run: the tokens, and maybe drafts behind them."""
        self.sequence.record(tokens, self.committed_len)
        if not self.is_last:
            self.item.remaining = self.item.remaining[len(self.tokens) :]


def schedule(
    backlog: Backlog[RequestT],
    *,
    max_batched_tokens: int,
    is_held: Callable[[WorkItem[RequestT]], bool],
    num_draft_slots: Callable[[RequestT, int], int],
    isolated: Callable[[str], AbstractContextManager[None]],
) -> list[ScheduledRun[RequestT]]:
    """Choose what to run and reserve the cache blocks for it.

    Args:
        max_batched_tokens: the step's token budget for prefills.
        is_held: whether the last token of an item has to wait, though not those before it.
        num_draft_slots: how many cache slots a request wants behind its given tokens, of which
            there are so many.
        isolated: lets what is raised for a sequence, by its id, end that sequence only.
    """
    runs: list[ScheduledRun[RequestT]] = []
    num_tokens, has_prefill = 0, False
    for item in backlog.in_turn():
        if item.sequence.seq_id not in backlog:  # preempted for an earlier one
            continue
        num_given = len(item.remaining) - is_held(item)
        if num_given == 0:
            continue
        if item.is_prefill:
            budget = max_batched_tokens - num_tokens
            num_given = min(num_given, budget if has_prefill else max(budget, MIN_PREFILL_CHUNK))
            if num_given <= 0:
                break
        with isolated(item.sequence.seq_id):
            is_last = num_given == len(item.remaining)
            given_len = item.sequence.cached_len + num_given
            num_wanted = num_draft_slots(item.request, given_len) if is_last else 0
            reserved_len = backlog.make_room(
                item.sequence,
                wanted=given_len + num_wanted,
                least=given_len,
                keep=[run.sequence for run in runs],
            )
            if reserved_len is None:
                continue
            run = ScheduledRun(
                item=item,
                tokens=item.remaining[:num_given],
                is_last=is_last,
                num_draft_slots=reserved_len - given_len,
            )
            runs.append(run)
            num_tokens += num_given + run.num_draft_slots
            if item.is_prefill:
                has_prefill = True
                backlog.charge(item, num_given)
    return runs
