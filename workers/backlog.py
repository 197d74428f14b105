"""The work a worker has accepted but not finished, and who gives way when blocks run out.

Target and drafter share it: both are handed work at any time (`add`), take what fits into
one step, and may be told to forget a sequence in between (`release`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from workers.errors import KVCacheExhaustedError
from workers.kv_cache import CachedSequence, SequenceTable
from workers.prompt_turns import PromptTurns
from workers.types import TokenLogprobs, WorkRequest, is_prefill_len

RequestT = TypeVar("RequestT", bound=WorkRequest)


@dataclass(slots=True, kw_only=True)
class WorkItem(Generic[RequestT]):
    request: RequestT
    sequence: CachedSequence
    remaining: tuple[int, ...]
    """The committed and assumed tokens that are still to run, the newest last."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens that have been run, if wanted; see VerifyResult."""

    @property
    def is_prefill(self) -> bool:
        return is_prefill_len(self.num_tokens)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that are still to run."""
        return len(self.remaining)

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def weight(self) -> float:
        return self.request.weight


class Backlog(Generic[RequestT]):
    """The work that waits, at most one item per sequence."""

    def __init__(self, sequences: SequenceTable, *, turn_len: int) -> None:
        """`turn_len`: after so many tokens of a long prompt it is another tenant's turn."""
        self._sequences = sequences
        self._items: dict[str, WorkItem[RequestT]] = {}
        self._preempted: list[str] = []
        self._turns = PromptTurns(turn_len)
        self.num_preemptions = 0
        """Sequences that lost their cache to others, since the start."""

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, seq_id: str) -> bool:
        return seq_id in self._items

    @property
    def has_only_prompts(self) -> bool:
        return all(item.is_prefill or not item.request.base_len for item in self._items.values())

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prompts that are still to run."""
        return sum(len(item.remaining) for item in self._items.values() if item.is_prefill)

    def add(self, item: WorkItem[RequestT]) -> None:
        """Take work on for a sequence that has none."""
        self._items[item.sequence.seq_id] = item

    def in_turn(self) -> list[WorkItem[RequestT]]:
        """Short work first, so that prefills never hold up running streams; prefills by the turns
        of their tenants. What is alike in that is run in the order of its arrival."""
        items = sorted(self._items.values(), key=lambda item: item.sequence.arrival)
        short = [item for item in items if not item.is_prefill]
        return short + self._turns.in_turn(item for item in items if item.is_prefill)

    def charge(self, item: WorkItem[RequestT], num_tokens: int) -> None:
        """Charge a tenant's turn with so many tokens of a prefill that are run."""
        self._turns.ran(item, num_tokens)

    def discard(self, seq_id: str) -> bool:
        """Forget a sequence's work, not its cache; returns whether there was any."""
        return self.take(seq_id) is not None

    def take(self, seq_id: str) -> WorkItem[RequestT] | None:
        """Forget a sequence's work, not its cache; returns the work, if there was any."""
        return self._items.pop(seq_id, None)

    def finish(self, item: WorkItem[RequestT]) -> None:
        """Forget an item that has been served; its committed tokens are cached."""
        del self._items[item.sequence.seq_id]
        committed_len = item.request.base_len + len(item.request.new_tokens)
        self._sequences.offer_prefix(item.sequence, committed_len)

    def release(self, seq_ids: Iterable[str]) -> list[str]:
        """Forget sequences; returns those that had work waiting."""
        waiting = []
        for seq_id in seq_ids:
            if self.discard(seq_id):
                waiting.append(seq_id)
            self._sequences.drop(seq_id)
        return waiting

    def make_room(
        self, sequence: CachedSequence, *, wanted: int, least: int, keep: Sequence[CachedSequence]
    ) -> int | None:
        """Reserve blocks for `wanted` tokens of a sequence, or as many as can be had.

        On shortage first shrink to `least`, then preempt sequences younger than this one that are
        not in `keep`, the youngest first. The oldest sequence always gets its room, so work never
        stands still. Returns the reserved length, or None if `least` could not be had.

        In the latter case a running sequence is preempted itself: its call may carry older ones,
        whose answers must not wait for room that only their progress can make. One that has yet to
        be cached waits in its place, so callers give it a call of its own.
        """
        for length in range(wanted, least - 1, -1):
            try:
                self._sequences.reserve(sequence, length)
            except KVCacheExhaustedError:
                continue
            return length
        kept = {id(kept_sequence) for kept_sequence in keep}
        while True:
            victim = self._sequences.youngest()
            if victim.arrival <= sequence.arrival or id(victim) in kept:
                # by what its caller believes: a new one may have found its beginning in the cache
                item = self._items[sequence.seq_id]
                if item.request.base_len > 0 and not item.is_prefill:
                    self._preempt(sequence)
                return None
            self._preempt(victim)
            try:
                self._sequences.reserve(sequence, least)
            except KVCacheExhaustedError:
                continue
            return least

    def take_preempted(self) -> list[str]:
        """Sequences that lost their cache while they had work waiting, since the last call."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def _preempt(self, victim: CachedSequence) -> None:
        self.num_preemptions += 1
        if self.discard(victim.seq_id):
            self._preempted.append(victim.seq_id)
        self._sequences.drop(victim.seq_id)
