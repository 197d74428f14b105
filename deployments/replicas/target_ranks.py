"""The other ranks of a target group: actors in the placement group of its replica.

The replica is rank 0. Its ranks hold no state that is not soft, so when one is lost the whole group
ends, and Serve starts another; the routers send their sequences elsewhere meanwhile.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.placement import bundle_order
from deployments.args import AppArgs, HubToken
from deployments.replicas.step_thread import NICENESS
from workers.errors import TandemError, WorkerLostError

if TYPE_CHECKING:
    from cluster.tensor_parallel import MeetingPoint, TensorParallelGroup

logger = logging.getLogger(__name__)

PING_TIMEOUT_S = 15.0


@ray.remote
class TargetRank:
    """A process with one shard of the target's weights and cache, which runs what rank 0 says."""

    def __init__(self) -> None:
        """Import torch and transformers, which takes seconds, while rank 0 does the same."""
        import deployments.replicas.target_model  # noqa: F401

    def follow(self, args: AppArgs, hub_token: HubToken, point: "MeetingPoint", rank: int) -> None:
        """Never returns; raises when it or another rank is lost, or cannot be loaded."""
        from cluster.tensor_parallel import TensorParallelGroup
        from deployments.replicas.target_model import load_target, target_cache
        from workers.model import resolve_device
        from workers.paged_model import PagedModel

        hub_token.use()
        os.nice(NICENESS)  # as the thread of rank 0
        group = TensorParallelGroup(point, rank=rank, device_type=resolve_device(args.device).type)
        try:
            PagedModel(
                load_target(args),
                target_cache(args),
                group,
                early_exit_layer=args.early_exit_layer,
            ).follow()
        finally:
            group.close()  # so that the other ranks do not wait for this one

    def ping(self) -> int:
        """The process id; not answered if it hangs."""
        return os.getpid()


def _bundles_by_node(bundles: PlacementGroup) -> Sequence[int]:
    """The bundle of each rank: neighbours are on one node."""
    nodes = placement_group_table(bundles)["bundles_to_node_id"]
    return bundle_order([nodes[bundle] for bundle in range(bundles.bundle_count)])


class OtherRanks:
    """Ranks 1 and up, as rank 0 sees them."""

    def __init__(self) -> None:
        """Start their processes, one in each further bundle of the replica; returns at once."""
        bundles = ray.util.get_current_placement_group()
        assert bundles is not None, "the deployment of a group asks for bundles"
        self._actors = [
            TargetRank.options(  # type: ignore[attr-defined]  # what ray.remote adds
                num_cpus=0,
                num_gpus=bundles.bundle_specs[bundle].get("GPU", 0),
                max_concurrency=2,  # follows, and answers pings meanwhile
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=bundles, placement_group_bundle_index=bundle
                ),
            ).remote()
            for bundle in _bundles_by_node(bundles)[1:]
        ]

    def load(self, args: AppArgs, hub_token: HubToken) -> None:
        """Have them load their shards; then they wait for this process to `join`."""
        from cluster.tensor_parallel import open_meeting_point

        self._point, self._store = open_meeting_point(
            ray.util.get_node_ip_address(), args.tensor_parallel_size
        )
        self._following = [
            actor.follow.remote(args, hub_token, self._point, rank)
            for rank, actor in enumerate(self._actors, start=1)
        ]

    def join(self, device_type: str) -> "TensorParallelGroup":
        """Be rank 0; blocks until all are there."""
        from cluster.tensor_parallel import TensorParallelGroup

        return TensorParallelGroup(self._point, rank=0, device_type=device_type, store=self._store)

    async def wait_for_loss(self) -> TandemError:
        """Returns why, when a rank is lost."""
        ends = [asyncio.ensure_future(self._end_of(rank)) for rank in range(len(self._following))]
        done, pending = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in pending:
            end.cancel()
        return done.pop().result()

    async def _end_of(self, index: int) -> TandemError:
        try:
            await self._following[index]
        except RayTaskError as error:
            if isinstance(error.cause, TandemError):
                return error.cause
            return WorkerLostError(f"rank {index + 1} has failed: {error.cause}")
        except RayError as error:
            return WorkerLostError(f"rank {index + 1} is lost: {error}")
        raise AssertionError("a rank follows for ever")

    async def check(self) -> tuple[int, ...]:
        """The ids of their processes; raises WorkerLostError if one does not answer soon."""
        pings = asyncio.gather(*(actor.ping.remote() for actor in self._actors))
        try:
            return tuple(await asyncio.wait_for(pings, PING_TIMEOUT_S))
        except (TimeoutError, RayError) as error:
            raise WorkerLostError(
                f"a rank does not answer within {PING_TIMEOUT_S:g} s: {error!r}"
            ) from error
