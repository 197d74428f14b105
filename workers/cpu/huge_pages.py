"""Memory in huge pages, where the system has them to give."""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 * 1024**2


def moved(tensor: Tensor) -> Tensor:
    """A CPU tensor's contents in huge pages; the tensor itself where it is smaller than one.

    For weights: every step reads all of them, and in pages of 4 KiB the processor would look up
    where a page is after every 64 lines.
    """
    if tensor.nbytes < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return tensor
    target = _allocate(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    return target.copy_(tensor)


def _allocate(num_bytes: int) -> Tensor:
    whole_bytes = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    # one more, as huge pages begin at multiples of their size; what is not touched takes no memory
    memory = mmap.mmap(-1, whole_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    with suppress(OSError):  # of a kernel without them: then they are small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    everything = torch.frombuffer(memory, dtype=torch.uint8)  # and keeps it
    start = -everything.data_ptr() % HUGE_PAGE_BYTES
    return everything[start : start + num_bytes]
