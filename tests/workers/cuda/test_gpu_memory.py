"""What a cache takes of a GPU that another process shares; no GPU is needed."""

import pytest
import torch

from workers.cache_size import GIB, PROCESS_BYTES
from workers.cuda import gpu_memory

DEVICE = torch.device("cuda", 0)
TOTAL = 80 * GIB


@pytest.mark.parametrize(
    ("share", "free_gib", "taken_gib", "expected"),
    [
        # alone, all that is free, whatever else has been taken
        (1, 60, 10, 60 * GIB),
        # two that start together see the same memory free, and each takes its own part
        (0.9, 70, 8, 72 * GIB - PROCESS_BYTES - 8 * GIB),
        (0.1, 70, 1, 8 * GIB - PROCESS_BYTES - GIB),
        # somebody has taken more than was theirs
        (0.9, 3, 8, 3 * GIB),
        # weights that exceed the share
        (0.1, 70, 9, 0),
    ],
)
def test_a_process_takes_no_more_than_its_share(
    share: float,
    free_gib: int,
    taken_gib: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_gib * GIB, TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: taken_gib * GIB)
    assert gpu_memory.free_bytes(DEVICE, share) == expected


@pytest.mark.parametrize(("share", "limits"), [(1, []), (0.1, [(0.1, 0)])])
def test_a_mistake_hurts_the_process_that_made_it(
    share: float, limits: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[float, int]] = []
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda fraction, device: made.append((fraction, device)),
    )
    gpu_memory.keep_to_share(DEVICE, share)
    assert made == limits
