"""Where the recurrent states of sequences stand, and which of them a step reads and writes.

A slot is a place for one state of all recurrent layers. Slot 0 holds what a text begins with, and
is never written. Each sequence has two more: see `kv_cache`.
"""

from dataclasses import dataclass

BEGINNING = 0
"""The slot of the state before any token: zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSlots:
    """The two states of a sequence."""

    committed: int
    """The slot of the state behind the committed tokens, as far as they were run."""
    drafts: int
    """The slot of the state behind the drafts that were run after them."""

    @classmethod
    def of(cls, index: int) -> "StateSlots":
        """The slots of the sequence with this number, from 0 on."""
        return cls(committed=2 * index + 1, drafts=2 * index + 2)


def num_slots(num_sequences: int) -> int:
    """Slots for so many sequences, and the spare one, which comes last."""
    return 2 * num_sequences + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMoves:
    """What a chunk of new tokens does to the states of its sequence."""

    read: int
    """The slot that its first token continues from."""
    slots: StateSlots
    num_drafts: int
    """How many of its last tokens are drafts: the state behind the others is kept apart."""

    @classmethod
    def to_spare(cls, spare: int) -> "StateMoves":
        """The moves of a chunk of no sequence: it begins anew, and what it writes is lost."""
        slots = StateSlots(committed=spare, drafts=spare)
        return cls(read=BEGINNING, slots=slots, num_drafts=0)
