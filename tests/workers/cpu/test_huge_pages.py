"""Tensors in huge pages hold what they held, and get such pages where there are any."""

import mmap
import re
from pathlib import Path

import pytest
import torch

from workers.cpu import huge_pages

SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def num_huge_bytes(address: int) -> int:
    """The bytes in huge pages of the mapping around an address; 0 if there is none."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapping := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(number, 16) for number in mapping.groups())
            is_there = begin <= address < end
        elif is_there and line.startswith("AnonHugePages:"):
            return 1024 * int(line.split()[1])
    return 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1024, 1024), (3, 1_000_003)])
def test_contents_are_the_same_and_begin_a_huge_page(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = torch.randn(shape, dtype=dtype)
    moved = huge_pages.moved(tensor)
    assert torch.equal(moved, tensor)
    assert moved.dtype == dtype
    assert moved.is_contiguous()
    assert moved.data_ptr() != tensor.data_ptr()
    assert moved.data_ptr() % huge_pages.HUGE_PAGE_BYTES == 0


def test_what_is_smaller_than_a_page_stays() -> None:
    tensor = torch.zeros(huge_pages.HUGE_PAGE_BYTES - 1, dtype=torch.uint8)
    assert huge_pages.moved(tensor) is tensor


def test_a_kernel_without_huge_pages_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)  # an advice that no kernel knows
    tensor = torch.randn(1024, 1024)
    assert torch.equal(huge_pages.moved(tensor), tensor)


def test_a_system_without_them_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    tensor = torch.randn(1024, 1024)
    assert huge_pages.moved(tensor) is tensor


@pytest.mark.skipif(
    not SYSTEM.exists() or "[never]" in SYSTEM.read_text(), reason="this system has no huge pages"
)
def test_pages_are_huge_and_given_back() -> None:
    moved = huge_pages.moved(torch.ones(64 * 1024**2, dtype=torch.uint8))
    address, half = moved.data_ptr(), moved.nbytes // 2  # memory may be in pieces
    assert num_huge_bytes(address) >= half
    del moved
    assert num_huge_bytes(address) < half
