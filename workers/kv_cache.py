"""Which sequence owns which block of the paged KV cache. Bookkeeping only: no tensors.

A block is `block_size` consecutive slots. It is *used* (reference count >= 1, in the block table of
that many sequences) or *free*; a free one may be *kept*, for what it holds, until others have run
out. A slot is block * block_size + offset.

A sequence caches its tokens [0, cached_len). After a commit, cached_len = committed length - 1:
the newest token has been sampled but not run. Rolling back is not advancing the length.

A model with recurrent layers keeps two states of a sequence besides: one behind its committed
tokens, which is never lost to a draft, and one behind the drafts that were run after them. What
lies between the state that fits and the tokens that turn out right is run again.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from workers.errors import KVCacheExhaustedError
from workers.prefix_cache import PrefixCache
from workers.sampling_params import SamplingParams
from workers.state_slots import StateSlots


class BlockAllocator:
    """Hands out block ids with reference counts; kept blocks last, the longest unused first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"need at least one block of one slot: {num_blocks=}, {block_size=}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_references = [0] * num_blocks
        self._kept: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Kept blocks without references, the longest unused first."""
        self.on_reuse: Callable[[int], None] = lambda _: None
        """Called when a kept block is about to lose its content."""

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks, all or none; raises KVCacheExhaustedError."""
        if num_blocks > self.num_free:
            raise KVCacheExhaustedError(
                f"{num_blocks} blocks wanted, {self.num_free} of {self.num_blocks} are free"
            )
        block_ids = [
            self._free.pop() if self._free else self._take_idle() for _ in range(num_blocks)
        ]
        for block_id in block_ids:
            self._num_references[block_id] = 1
        return block_ids

    def keep(self, block_id: int) -> None:
        """Keep a block's content once it is free: other blocks are handed out first."""
        assert self._num_references[block_id] > 0, f"block {block_id} is free"
        self._kept.add(block_id)

    def share(self, block_ids: Sequence[int]) -> None:
        """Add a reference to blocks that are in use, or kept."""
        for block_id in block_ids:
            is_idle = block_id in self._idle
            assert self._num_references[block_id] > 0 or is_idle, f"block {block_id} is free"
            self._num_references[block_id] += 1
            self._idle.pop(block_id, None)

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop a reference; a block without one is free again."""
        for block_id in reversed(block_ids):
            assert self._num_references[block_id] > 0, f"block {block_id} is free already"
            self._num_references[block_id] -= 1
            if self._num_references[block_id] > 0:
                continue
            if block_id in self._kept:
                self._idle[block_id] = None
            else:
                self._free.append(block_id)

    def _take_idle(self) -> int:
        block_id, _ = self._idle.popitem(last=False)
        self._kept.discard(block_id)
        self.on_reuse(block_id)
        return block_id

    def check_integrity(self, block_tables: Sequence[Sequence[int]]) -> None:
        """Assert that exactly the blocks of `block_tables` are used, each as often as counted."""
        expected = [0] * self.num_blocks
        for block_table in block_tables:
            assert len(set(block_table)) == len(block_table), f"twice in one table: {block_table}"
            for block_id in block_table:
                expected[block_id] += 1
        assert expected == self._num_references, "reference counts differ from the block tables"
        assert self._kept >= set(self._idle), "idle blocks that nobody keeps"
        free = sorted([*self._free, *self._idle])
        assert free == [b for b in range(self.num_blocks) if expected[b] == 0], "free list is wrong"


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class CachedSequence:
    """A sequence's soft state in a worker; what else is kept of it goes by its identity."""

    seq_id: str
    arrival: int
    """Order of arrival; the youngest gives way when blocks run out."""
    tokens: list[int] = field(default_factory=list)
    """The tokens whose keys and values are cached, in order."""
    block_table: list[int] = field(default_factory=list)
    salt: str = ""
    keys: list[bytes] = field(default_factory=list)
    """The prefix keys of the sequence's first blocks, those that others may share."""
    sampling: SamplingParams | None = None
    """What the sequence's last request said of how tokens are chosen."""
    state_slots: StateSlots | None = None
    """Where its recurrent states are, in a model that has some."""
    committed_state_len: int = 0
    """Tokens that the state behind committed tokens has seen."""
    newest_state_len: int = 0
    """Tokens that the newest state has seen."""

    @property
    def cached_len(self) -> int:
        return len(self.tokens)

    def record(self, tokens: Sequence[int], committed_len: int) -> None:
        """Note that tokens were run, of which those from `committed_len` on are drafts."""
        if self.cached_len < committed_len:
            self.committed_state_len = min(committed_len, self.cached_len + len(tokens))
        self.tokens += tokens
        self.newest_state_len = self.cached_len

    def state_len(self, length: int) -> int:
        """The tokens that the newest state has seen that saw none from `length` on."""
        lens = (0, self.committed_state_len, self.newest_state_len)
        return max(seen for seen in lens if seen <= length)


class SequenceTable:
    """All sequences of a worker and the blocks they hold."""

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        with_prefixes: bool = True,
        num_states: int | None = None,
    ) -> None:
        """Make a table of no sequences.

        Args:
            with_prefixes: whether sequences that begin alike share blocks. Those of a model with
                recurrent states never do: a state is that of a whole text.
            num_states: sequences that there are recurrent states for; None if the model has none.
        """
        assert num_states is None or not with_prefixes, "blocks are shared, states are not"
        self.allocator = allocator
        self._free_states = (
            None
            if num_states is None
            else [StateSlots.of(index) for index in range(num_states)][::-1]
        )
        self._prefixes = PrefixCache(allocator.block_size) if with_prefixes else None
        if self._prefixes is not None:
            allocator.on_reuse = self._prefixes.remove
        self.num_prompt_tokens = 0
        """Tokens of new sequences, since the start."""
        self.num_prefix_tokens = 0
        """Tokens of new sequences that were found in the cache, since the start."""
        self._sequences: dict[str, CachedSequence] = {}
        self._num_arrivals = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, seq_id: str) -> bool:
        return seq_id in self._sequences

    def synchronise(
        self,
        seq_id: str,
        base_len: int,
        new_tokens: Sequence[int],
        *,
        salt: str = "",
        may_reuse: bool = True,
    ) -> tuple[CachedSequence, tuple[int, ...] | None]:
        """Make the cache a prefix of the committed tokens; return what is left to run.

        A new sequence starts with the blocks of others that begin alike, under the same salt.

        Whatever the worker ran beyond `base_len` (drafts, a verification whose answer was lost) is
        kept as far as it turned out right, unless all new tokens have to be run (`may_reuse`). At
        least the newest token is always left to run, since its logits decide what follows. None is
        left where that cannot be had, so that all from the sequence's cached_len on have to be
        sent: the cache ends before base_len, or tokens have changed within a shared block.
        """
        sequence = self._sequences.get(seq_id) or CachedSequence(
            seq_id=seq_id, arrival=self._num_arrivals, salt=salt
        )
        if base_len > sequence.cached_len:
            return sequence, None
        if seq_id not in self._sequences:
            self._sequences[seq_id] = sequence
            self._num_arrivals += 1
            self._start_with_prefix(sequence, new_tokens, may_reuse=may_reuse)
        num_matching = 0
        for cached, new in zip(sequence.tokens[base_len:], new_tokens[:-1], strict=False):
            if cached != new or not may_reuse:
                break
            num_matching += 1
        length = base_len + num_matching
        if length < len(sequence.keys) * self.allocator.block_size:
            length -= length % self.allocator.block_size  # never write to a block others may share
            del sequence.keys[length // self.allocator.block_size :]
        self.truncate(sequence, length)
        if length < base_len:
            return sequence, None
        remaining = tuple(new_tokens[length - base_len :])
        if self._free_states is not None:
            state_len = sequence.state_len(length)
            remaining = tuple(sequence.tokens[state_len:]) + remaining
            self.truncate(sequence, state_len)
        return sequence, remaining

    def unchanged_len(self, seq_id: str, length: int) -> int:
        """How many of the first `length` tokens need not be sent, where others may follow them now:
        those that are cached, and of a block that others may share, all or none."""
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            return 0
        length = min(length, sequence.cached_len)
        is_shared = length < len(sequence.keys) * self.allocator.block_size
        return length - length % self.allocator.block_size if is_shared else length

    def offer_prefix(self, sequence: CachedSequence, committed_len: int) -> None:
        """Let others share the full blocks of the first tokens, which will not change any more."""
        if self._prefixes is None:
            return
        size = self.allocator.block_size
        for index in range(len(sequence.keys), min(committed_len, sequence.cached_len) // size):
            tokens = sequence.tokens[index * size : (index + 1) * size]
            before = sequence.keys[-1] if sequence.keys else None
            key = self._prefixes.key(before, tokens, sequence.salt)
            sequence.keys.append(key)
            if self._prefixes.add(key, sequence.block_table[index]):
                self.allocator.keep(sequence.block_table[index])

    def reserve(self, sequence: CachedSequence, length: int) -> None:
        """Have room for `length` tokens; raises KVCacheExhaustedError and changes nothing."""
        needs_states = self._free_states is not None and sequence.state_slots is None
        if needs_states and not self._free_states:
            raise KVCacheExhaustedError("all recurrent states are taken")
        missing = self.allocator.num_blocks_for(length) - len(sequence.block_table)
        if missing > 0:
            sequence.block_table += self.allocator.allocate(missing)
        if needs_states:
            assert self._free_states
            sequence.state_slots = self._free_states.pop()

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Forget the tokens from `length` on, and blocks that hold none."""
        del sequence.tokens[length:]
        num_kept = self.allocator.num_blocks_for(length)
        if num_kept < len(sequence.block_table):
            self.allocator.release(sequence.block_table[num_kept:])
            del sequence.block_table[num_kept:]

    def drop(self, seq_id: str) -> None:
        """Forget a sequence and free what it holds; unknown ids are ignored."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is None:
            return
        self.allocator.release(sequence.block_table)
        if sequence.state_slots is not None:
            assert self._free_states is not None
            self._free_states.append(sequence.state_slots)

    def _start_with_prefix(
        self, sequence: CachedSequence, tokens: Sequence[int], *, may_reuse: bool
    ) -> None:
        if self._prefixes is None:
            return
        # the newest token is always left to run
        blocks, keys = self._prefixes.find(tokens[:-1] if may_reuse else (), sequence.salt)
        self.allocator.share(blocks)
        sequence.block_table, sequence.keys = blocks, keys
        sequence.tokens = list(tokens[: len(blocks) * self.allocator.block_size])
        self.num_prompt_tokens += len(tokens)
        self.num_prefix_tokens += len(sequence.tokens)

    def youngest(self) -> CachedSequence:
        """The sequence that arrived last among those that hold blocks or states."""
        holders = [s for s in self._sequences.values() if s.block_table or s.state_slots]
        return max(holders, key=lambda sequence: sequence.arrival)

    def check_integrity(self) -> None:
        tables = [sequence.block_table for sequence in self._sequences.values()]
        self.allocator.check_integrity(tables)
        for sequence in self._sequences.values():
            needed = self.allocator.num_blocks_for(sequence.cached_len)
            assert len(sequence.block_table) >= needed, f"{sequence.seq_id}: too few blocks"
        taken = [s.state_slots for s in self._sequences.values() if s.state_slots is not None]
        all_states = [*taken, *(self._free_states or ())]
        assert len(set(all_states)) == len(all_states), "a recurrent state belongs to two"
