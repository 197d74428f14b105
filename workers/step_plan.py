"""What one forward runs: decided by one rank of a group, run alike by all."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.kv_cache import CachedSequence
from workers.state_slots import BEGINNING, StateMoves


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The new tokens of one sequence in a batch."""

    cached_len: int
    num_new: int
    block_table: Sequence[int]
    """Blocks for cached_len + num_new tokens, at least."""
    states: StateMoves | None = None
    """What becomes of recurrent states, if there are any; without, the spare slot is written."""


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """The new tokens of a step, of all its sequences."""

    chunks: list[Chunk] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """The chunks' new tokens, flattened in order."""
    logit_rows: list[int] = field(default_factory=list)
    """Indices into `tokens` of those whose logits are wanted."""
    is_early: bool = False
    """Whether the first layers alone are run, for drafts by early exit."""

    def add(
        self,
        sequence: CachedSequence,
        tokens: Sequence[int],
        *,
        num_logits: int,
        committed_len: int,
    ) -> None:
        """Run the next tokens of a sequence, and get the logits of the last `num_logits` of them.

        Those from position `committed_len` on are drafts. Room for all must have been reserved.
        """
        self.add_chunk(
            tokens,
            cached_len=sequence.cached_len,
            block_table=sequence.block_table,
            num_logits=num_logits,
            states=_state_moves(sequence, len(tokens), committed_len),
        )

    def add_chunk(
        self,
        tokens: Sequence[int],
        *,
        cached_len: int,
        block_table: Sequence[int],
        num_logits: int,
        states: StateMoves | None = None,
    ) -> None:
        """As `add`, for tokens that stand behind `cached_len` others in these blocks."""
        self.chunks.append(
            Chunk(
                cached_len=cached_len, num_new=len(tokens), block_table=block_table, states=states
            )
        )
        self.tokens += tokens
        self.logit_rows += range(len(self.tokens) - num_logits, len(self.tokens))


def _state_moves(
    sequence: CachedSequence, num_tokens: int, committed_len: int
) -> StateMoves | None:
    slots = sequence.state_slots
    if slots is None:
        return None
    begin, end = sequence.cached_len, sequence.cached_len + num_tokens
    assert begin == sequence.state_len(begin), f"no state of {sequence.seq_id} is at {begin}"
    has_drafts = begin > sequence.committed_state_len
    read = BEGINNING if begin == 0 else slots.drafts if has_drafts else slots.committed
    num_drafts = min(num_tokens, max(0, end - committed_len))
    return StateMoves(read=read, slots=slots, num_drafts=num_drafts)
