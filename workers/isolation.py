"""Decisions about many sequences at once, of which one can fail alone."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor

DeviceLost = torch.AcceleratorError
"""What a GPU raises once a kernel has failed, and from then on in every call of the process.

No sequence may be blamed for it, nor can any be served: the worker has to end, so that another
takes its place and its sequences.
"""

EntryT = TypeVar("EntryT")
DecisionT = TypeVar("DecisionT")


def decide_each(
    decide: Callable[[Sequence[EntryT], Tensor], Sequence[DecisionT]],
    entries: Sequence[EntryT],
    logits: Tensor,
    *,
    num_rows: Sequence[int],
    isolated: Callable[[EntryT], AbstractContextManager[object]],
) -> list[DecisionT | None]:
    """What is decided about each entry from its logits; None where that raises.

    Args:
        decide: is given all entries, and each by itself once it has raised, which shows for whom.
            So it may change nothing.
        logits: those of the entries, in their order.  # [sum(num_rows), vocab]
        num_rows: how many rows of them each entry has.
        isolated: gets an entry, and takes what is raised for it.
    """
    try:
        return list(decide(entries, logits))
    except Exception:  # of one of them
        decisions: list[DecisionT | None] = [None] * len(entries)
        of_each = zip(entries, logits.split(list(num_rows)), strict=True)
        for index, (entry, rows) in enumerate(of_each):
            with isolated(entry):
                decisions[index] = decide([entry], rows)[0]
        return decisions
