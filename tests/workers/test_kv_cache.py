"""The block allocator and the sequence table, as a random walk with its integrity checked."""

import random
from collections.abc import Sequence

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


def test_synchronise_leaves_a_cache_alone_that_ends_too_early() -> None:
    table = SequenceTable(BlockAllocator(num_blocks=8, block_size=2))
    sequence, remaining = table.synchronise("a", 3, [4])
    assert (sequence.cached_len, remaining, len(table)) == (0, None, 0)
    sequence, _ = table.synchronise("a", 0, [1, 2])
    table.reserve(sequence, 2)
    sequence.tokens += [1, 2]
    assert table.synchronise("a", 3, [4]) == (sequence, None)
    assert sequence.tokens == [1, 2]


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
    allocator = BlockAllocator(num_blocks=20, block_size=3)
    table = SequenceTable(allocator)
    written: dict[int, int] = {}
    """What a cache would hold: the token in each slot."""
    num_exhausted = 0
    for _ in range(3000):
        seq_id = f"s{rng.randrange(8)}"
        action = rng.choice(["grow", "grow", "rollback", "drop"])
        held = table._sequences.get(seq_id)
        cached_len = held.cached_len if held else 0
        if action == "drop":
            table.drop(seq_id)
        elif action == "rollback" and cached_len:
            wanted = rng.randrange(cached_len + 1)
            sequence, remaining = table.synchronise(seq_id, wanted, [-1])
            # all but what others may share can be rolled back to the token
            assert sequence.cached_len == (wanted if remaining else wanted - wanted % 3)
        elif action == "grow":
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 8))]
            sequence, remaining = table.synchronise(seq_id, cached_len, tokens)
            assert remaining
            length = sequence.cached_len + len(remaining)
            try:
                table.reserve(sequence, length)
            except KVCacheExhaustedError:
                num_exhausted += 1
            else:
                for position, token in enumerate(remaining, start=sequence.cached_len):
                    block, offset = divmod(position, 3)
                    written[sequence.block_table[block] * 3 + offset] = token
                sequence.tokens += remaining
                table.offer_prefix(sequence, rng.randrange(length + 1))
        table.check_integrity()
        for sequence in table._sequences.values():
            slots = [sequence.block_table[i // 3] * 3 + i % 3 for i in range(sequence.cached_len)]
            assert [written[slot] for slot in slots] == sequence.tokens
    assert num_exhausted > 0
    assert table.num_prefix_tokens > 100
    for seq_id in list(table._sequences):
        table.drop(seq_id)
    table.check_integrity()
    assert allocator.num_used == 0


class TestPrefixes:
    def make_table(self, num_blocks: int = 8) -> SequenceTable:
        return SequenceTable(BlockAllocator(num_blocks=num_blocks, block_size=2))

    def run(
        self, table: SequenceTable, seq_id: str, tokens: Sequence[int], salt: str = ""
    ) -> tuple[int, ...]:
        """Cache a text and offer it; returns the tokens that had to be run."""
        sequence, remaining = table.synchronise(seq_id, 0, tokens, salt=salt)
        assert remaining is not None
        table.reserve(sequence, len(tokens))
        sequence.tokens += remaining
        table.offer_prefix(sequence, len(tokens))
        table.check_integrity()
        return remaining

    def test_what_begins_alike_is_shared(self) -> None:
        table = self.make_table()
        assert self.run(table, "a", [1, 2, 3, 4, 5]) == (1, 2, 3, 4, 5)
        assert self.run(table, "b", [1, 2, 3, 4, 6, 7]) == (6, 7)
        assert self.run(table, "c", [1, 2, 9]) == (9,)
        assert self.run(table, "d", [3, 4, 5]) == (3, 4, 5)  # not where it began
        assert (table.num_prompt_tokens, table.num_prefix_tokens) == (17, 6)

    def test_the_newest_token_is_always_left_to_run(self) -> None:
        table = self.make_table()
        self.run(table, "a", [1, 2, 3, 4])
        assert self.run(table, "b", [1, 2, 3, 4]) == (3, 4)

    def test_nothing_is_shared_across_salts(self) -> None:
        table = self.make_table()
        self.run(table, "a", [1, 2, 3], salt="mine")
        assert self.run(table, "b", [1, 2, 3]) == (1, 2, 3)
        assert self.run(table, "c", [1, 2, 3], salt="yours") == (1, 2, 3)
        assert self.run(table, "d", [1, 2, 3], salt="mine") == (3,)

    def test_what_may_still_change_is_not_offered(self) -> None:
        table = self.make_table()
        sequence, _ = table.synchronise("a", 0, [1])
        table.reserve(sequence, 4)
        sequence.tokens += [1, 2, 3, 4]  # of which three are drafts
        table.offer_prefix(sequence, 1)
        assert self.run(table, "b", [1, 2, 3, 4]) == (1, 2, 3, 4)

    def test_a_text_outlives_its_sequence_until_its_room_is_needed(self) -> None:
        table = self.make_table(num_blocks=4)
        self.run(table, "a", [1, 2, 3, 4, 5])
        table.drop("a")
        assert table.allocator.num_used == 0
        assert self.run(table, "b", [1, 2, 3, 4, 6]) == (6,)
        table.drop("b")
        self.run(table, "c", [7, 8, 9, 10, 11])  # takes the free ones, then the oldest kept one
        table.drop("c")
        assert self.run(table, "d", [1, 2, 3, 4, 6]) == (3, 4, 6)

    def test_a_changed_text_never_overwrites_a_shared_block(self) -> None:
        table = self.make_table()
        self.run(table, "a", [1, 2, 3, 4, 5])
        sequence, remaining = table.synchronise("a", 3, [9])
        assert (sequence.cached_len, remaining) == (2, None)  # send from there, please
        sequence, remaining = table.synchronise("a", 2, [3, 9])
        assert remaining == (3, 9)
        table.reserve(sequence, 4)
        sequence.tokens += remaining
        table.check_integrity()
        assert self.run(table, "b", [1, 2, 3, 4, 6]) == (6,)

    def test_it_can_be_off(self) -> None:
        table = SequenceTable(BlockAllocator(num_blocks=8, block_size=2), with_prefixes=False)
        self.run(table, "a", [1, 2, 3])
        assert self.run(table, "b", [1, 2, 3]) == (1, 2, 3)
