"""How a draft replica and a rank of the target share a GPU."""


def target_gpu_share(draft_gpu_share: float) -> float:
    """The part of a GPU for each rank of a target: what a draft replica leaves of a shared one."""
    return 1 if draft_gpu_share == 1 else round(1 - draft_gpu_share, 4)


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
