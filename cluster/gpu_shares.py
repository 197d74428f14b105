"""How a draft replica and a rank of the target share a GPU."""

GPU_PARTS = 10_000
"""The parts in which Ray counts a GPU. Sums of whole numbers are exact, those of 0.1 are not."""


def gpu_parts(share: float) -> int:
    """A share of a GPU in those parts, to the nearest."""
    return round(share * GPU_PARTS)


def target_gpu_share(draft_gpu_share: float) -> float:
    """The part of a GPU for each rank of a target: what a draft replica leaves of a shared one."""
    rest = GPU_PARTS - gpu_parts(draft_gpu_share)
    return rest / GPU_PARTS if rest else 1


def check_gpu_share(draft_gpu_share: float, *, device: str, tp_size: int) -> None:
    """Raise ValueError where there is no GPU to share, or ranks of a group could share one."""
    if draft_gpu_share == 1:
        return
    share = f"draft_gpu_share={draft_gpu_share:g}"
    if device == "cpu":
        raise ValueError(f"{share} is given, but device=cpu uses no GPU; drop one of them")
    if tp_size > 1 and draft_gpu_share >= 0.5:
        raise ValueError(
            f"{share} leaves so little to the ranks of tensor_parallel_size={tp_size} that two of "
            "a group could be on one GPU, which NCCL refuses; use less than 0.5"
        )
