"""The block allocator and the sequence table, as a random walk with its integrity checked."""

import random

import pytest

from workers.errors import KVCacheExhaustedError
from workers.kv_cache import BlockAllocator, SequenceTable


def test_allocation_is_all_or_nothing() -> None:
    allocator = BlockAllocator(num_blocks=4, block_size=2)
    allocator.allocate(3)
    with pytest.raises(KVCacheExhaustedError, match="2 blocks wanted, 1 of 4 are free"):
        allocator.allocate(2)
    assert allocator.num_free == 1


def test_shared_blocks_are_freed_by_their_last_owner() -> None:
    allocator = BlockAllocator(num_blocks=4, block_size=2)
    blocks = allocator.allocate(2)
    allocator.share(blocks)
    allocator.release(blocks)
    assert allocator.num_used == 2
    allocator.check_integrity([blocks])
    allocator.release(blocks)
    assert allocator.num_used == 0
    allocator.check_integrity([])


def test_integrity_check_sees_a_leak_a_double_owner_and_a_wrong_count() -> None:
    allocator = BlockAllocator(num_blocks=4, block_size=2)
    blocks = allocator.allocate(2)
    for tables in ([], [blocks[:1]], [blocks, blocks], [[*blocks, blocks[0]]], [[*blocks, 3]]):
        with pytest.raises(AssertionError):
            allocator.check_integrity(tables)


def test_releasing_a_free_block_is_caught() -> None:
    allocator = BlockAllocator(num_blocks=2, block_size=2)
    blocks = allocator.allocate(1)
    allocator.release(blocks)
    with pytest.raises(AssertionError, match="free already"):
        allocator.release(blocks)


def test_synchronise_keeps_what_was_run_ahead_and_right() -> None:
    table = SequenceTable(BlockAllocator(num_blocks=8, block_size=2))
    sequence, remaining = table.synchronise("a", 0, [1, 2, 3])
    assert remaining == (1, 2, 3)
    table.reserve(sequence, 6)
    sequence.tokens += [1, 2, 3, 40, 50, 60]
    # 40 was accepted, 50 was not; 51 is the newest token and is always left to run
    _, remaining = table.synchronise("a", 3, [40, 51])
    assert remaining == (51,)
    assert sequence.tokens == [1, 2, 3, 40]
    assert len(sequence.block_table) == 2
    table.check_integrity()


def test_synchronise_after_full_acceptance_leaves_two_tokens() -> None:
    table = SequenceTable(BlockAllocator(num_blocks=8, block_size=2))
    sequence, _ = table.synchronise("a", 0, [1])
    table.reserve(sequence, 3)
    sequence.tokens += [1, 40, 50]  # drafts 40, 50, 60; the last is never run
    _, remaining = table.synchronise("a", 1, [40, 50, 60, 7])
    assert remaining == (60, 7)


def test_synchronise_always_leaves_the_newest_token() -> None:
    table = SequenceTable(BlockAllocator(num_blocks=8, block_size=2))
    sequence, _ = table.synchronise("a", 0, [1, 2])
    table.reserve(sequence, 2)
    sequence.tokens += [1, 2]
    _, remaining = table.synchronise("a", 0, [1, 2])
    assert remaining == (2,)


def test_truncate_then_grow_gives_a_table_of_the_same_length() -> None:
    table = SequenceTable(BlockAllocator(num_blocks=8, block_size=4))
    sequence, _ = table.synchronise("a", 0, [0])
    table.reserve(sequence, 11)
    sequence.tokens += range(11)
    before = list(sequence.block_table)
    table.truncate(sequence, 5)
    assert sequence.block_table == before[:2]
    table.reserve(sequence, 11)
    assert sorted(sequence.block_table) == sorted(before)
    table.check_integrity()


@pytest.mark.parametrize("seed", range(5))
def test_random_walk_keeps_integrity(seed: int) -> None:
    rng = random.Random(seed)
    table = SequenceTable(BlockAllocator(num_blocks=20, block_size=3))
    lengths: dict[str, int] = {}
    num_exhausted = 0
    for _ in range(2000):
        seq_id = f"s{rng.randrange(8)}"
        action = rng.choice(["grow", "grow", "rollback", "drop"])
        if action == "drop":
            table.drop(seq_id)
            lengths.pop(seq_id, None)
        elif action == "rollback" and seq_id in lengths:
            lengths[seq_id] = rng.randrange(lengths[seq_id] + 1)
            sequence, _ = table.synchronise(seq_id, lengths[seq_id], [-1])
            assert sequence.cached_len == lengths[seq_id]
        elif action == "grow":
            base_len = lengths.get(seq_id, 0)
            new_tokens = list(range(base_len, base_len + rng.randrange(1, 8)))
            sequence, remaining = table.synchronise(seq_id, base_len, new_tokens)
            try:
                table.reserve(sequence, base_len + len(new_tokens))
                sequence.tokens += remaining
            except KVCacheExhaustedError:
                num_exhausted += 1
            lengths[seq_id] = sequence.cached_len
        table.check_integrity()
        assert {s: table.cached_len(s) for s in lengths} == lengths
    assert num_exhausted > 0
    for seq_id in list(lengths):
        table.drop(seq_id)
    table.check_integrity()
    assert table.allocator.num_used == 0
