"""How much memory a cache may take, and how blocks and recurrent states share it."""

from dataclasses import dataclass

from workers.state_slots import num_slots

GIB = 1024**3
# What a worker takes beside weights and cache: of main memory for Python, torch and Ray (0.42 GiB
# were measured without Ray), of a GPU about as much for CUDA's context.
PROCESS_BYTES = GIB // 2
MAX_STATE_SHARE = 0.5
"""The share that recurrent states may take. They take less if else no sequence had its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheNeeds:
    """What the blocks and states of a cache take, and how much of them is wanted at most."""

    block_bytes: int
    blocks_per_sequence: int
    """Blocks of the longest sequence."""
    state_bytes: int
    """Bytes of the recurrent states in one slot; 0 for a model that has none."""
    max_num_seqs: int
    """Sequences that should fit."""

    @property
    def least_bytes(self) -> int:
        """What one sequence takes at full length."""
        return self.states_bytes(1) + self.blocks_per_sequence * self.block_bytes

    def states_bytes(self, num_states: int) -> int:
        """What the states of so many sequences take."""
        return num_slots(num_states) * self.state_bytes if self.state_bytes else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShares:
    """What a cache consists of."""

    num_blocks: int
    num_states: int
    """Sequences that have recurrent states; 0 for a model that has none."""


def share_cache(cache_bytes: int, needs: CacheNeeds) -> CacheShares:
    """Make the most of so many bytes; there may be no blocks if they are too few."""
    num_states = 0
    if needs.state_bytes:
        most_bytes = int(cache_bytes * MAX_STATE_SHARE)
        if cache_bytes >= needs.least_bytes:
            longest_bytes = needs.blocks_per_sequence * needs.block_bytes
            most_bytes = min(most_bytes, cache_bytes - longest_bytes)
        num_fitting = (most_bytes // needs.state_bytes - num_slots(0)) // 2
        num_states = min(needs.max_num_seqs, max(1, num_fitting))
    left = max(0, cache_bytes - needs.states_bytes(num_states))
    max_blocks = needs.blocks_per_sequence * needs.max_num_seqs
    return CacheShares(num_blocks=min(left // needs.block_bytes, max_blocks), num_states=num_states)


def share_of_gpu(total_bytes: int, share: float) -> int:
    """What weights and cache may take of a GPU of which a process has this share."""
    return int(total_bytes * share) - PROCESS_BYTES
