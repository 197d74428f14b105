"""Ranks that share a model's weights, and how they keep in step.

The only module that uses torch.distributed. The first rank decides what is run and announces it,
the others follow: so nobody can diverge into a hang. Plans travel over gloo; what the layers
exchange goes over gloo on CPUs and NCCL on GPUs.
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from workers.errors import WorkerLostError
from workers.step_plan import StepPlan

BACKENDS = {"cpu": "cpu:gloo", "cuda": "cpu:gloo,cuda:nccl"}
MEETING_TIMEOUT = timedelta(minutes=5)
# An idle group says nothing for long: whether a rank hangs is found out by who watches it.
SILENCE_TIMEOUT = timedelta(days=365)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPoint:
    """Where the ranks of a group find each other."""

    host: str
    port: int
    num_ranks: int


def open_meeting_point(host: str, num_ranks: int) -> tuple[MeetingPoint, Store]:
    """A meeting point on a free port of this process's host; it is there as long as the store is
    kept.

    It asks nobody for a token, so it listens on that address alone: by itself the store would
    listen on all interfaces.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port: int = listener.getsockname()[1]
        store = TCPStore(
            host,
            port,
            num_ranks,
            is_master=True,
            timeout=MEETING_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store closes it
        )
    return MeetingPoint(host=host, port=port, num_ranks=num_ranks), store


class TensorParallelGroup:
    """This process as a rank of a group; see `workers.paged_model.Ranks`.

    A process is in one group only, since transformers shards over torch's default process group.
    """

    def __init__(
        self, point: MeetingPoint, *, rank: int, device_type: str, store: Store | None = None
    ) -> None:
        """Wait until all ranks are there; raises WorkerLostError if they are not in time.

        Args:
            store: of the meeting point, where it is in this process.
        """
        if store is None:
            store = TCPStore(
                point.host, point.port, point.num_ranks, is_master=False, timeout=MEETING_TIMEOUT
            )
        _meet(store, rank, point.num_ranks)
        dist.init_process_group(
            BACKENDS[device_type],
            store=store,
            rank=rank,
            world_size=point.num_ranks,
            timeout=SILENCE_TIMEOUT,
        )
        self.num_ranks = point.num_ranks

    def least(self, number: int) -> int:
        """The least of all ranks' numbers; every rank must ask."""
        numbers = torch.tensor([number])
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return int(numbers)

    def announce(self, plan: StepPlan) -> None:
        """Have the other ranks run a plan now."""
        self._broadcast(plan)

    def follow(self, run: Callable[[StepPlan], object]) -> NoReturn:
        """Run what the first rank says; raises RuntimeError when that one is gone."""
        while True:
            run(self._broadcast(StepPlan()))

    def _broadcast(self, plan: StepPlan) -> StepPlan:
        """The plan that the first rank gave, on all ranks."""
        plans = [plan]
        dist.broadcast_object_list(plans, src=0, device=torch.device("cpu"))
        return plans[0]

    def close(self) -> None:
        """Leave: the other ranks' collectives fail from now on."""
        dist.destroy_process_group()


def _meet(store: Store, rank: int, num_ranks: int) -> None:
    """Wait for all: the process group itself would wait for as long as it may be silent."""
    names = [f"rank {number}" for number in range(num_ranks)]
    store.set(names[rank], "is here")
    try:
        store.wait(names, MEETING_TIMEOUT)
    except RuntimeError:
        missing = [name for name in names if not store.check([name])]
        raise WorkerLostError(
            f"{', '.join(missing)} of {num_ranks} did not come within "
            f"{MEETING_TIMEOUT.total_seconds():g} s"
        ) from None
