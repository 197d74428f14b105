"""A GPU's memory, of which a process may take its share where another one has the rest."""

import torch

from workers.cache_size import share_of_gpu


def free_bytes(device: torch.device, share: float) -> int:
    """What a cache may take of what this process has not taken yet."""
    free, total = torch.cuda.mem_get_info(device)
    if share == 1:
        return free
    # what is free now may be gone in a moment: the others start when they like
    left = share_of_gpu(total, share) - torch.cuda.memory_reserved(device)
    return max(0, min(free, left))


def keep_to_share(device: torch.device, share: float) -> None:
    """Let this process run out of memory, not the others, when it has taken its share."""
    if share < 1:
        torch.cuda.set_per_process_memory_fraction(share, device.index)
