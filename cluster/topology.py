"""What a cluster is made of: nodes with cores, GPUs and memory."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine, or a pod, of the cluster."""

    name: str
    num_cpus: float
    num_gpus: float = 0
    memory_bytes: int = 0
    """Main memory; 0 where nobody knows, since only `plan` asks."""
    gpu_memory_bytes: int = 0
    """Memory of one GPU; 0 where nobody knows."""
    kind: str = ""
    """The name that nodes of the same build share."""


def uses_gpus(device: str, nodes: Sequence[Node]) -> bool:
    """Whether the option `device` means GPUs here: `auto` does where there are any."""
    if device == "auto":
        return any(node.num_gpus > 0 for node in nodes)
    return device.startswith("cuda")
