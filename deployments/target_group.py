"""The target deployment: one replica is one target group."""

import os
from collections.abc import Sequence

from ray import serve

from cluster.demo import bundled
from deployments.args import AppArgs
from deployments.pinning import PINNED
from deployments.transport.messages import VERIFY
from deployments.worker_replica import WorkerReplica
from workers.types import Reply, VerifyRequest, VerifyResult

MAX_BATCHED_TOKENS = {"cpu": 256, "cuda": 2048}


@serve.deployment(
    max_ongoing_requests=1000,
    max_constructor_retry_count=3,
    health_check_period_s=5,
    logging_config={"enable_access_log": False},  # it would write a line per round
    request_router_config=PINNED,
)
class TargetGroup(WorkerReplica[VerifyRequest, VerifyResult]):
    """Verifies for all routers; see `Target.verify` for the contract."""

    async def __init__(self, args: AppArgs) -> None:  # type: ignore[misc]
        from workers.model import load_model
        from workers.paged_model import CacheOptions
        from workers.target import Target

        def make_target() -> Target:
            model = load_model(bundled.resolve(args.target), dtype=args.dtype, device=args.device)
            cache = CacheOptions(
                block_size=args.block_size,
                max_model_len=args.max_model_len,
                max_num_seqs=args.max_num_seqs,
                kv_cache_gib=args.kv_cache_gib,
                prefix_caching=args.prefix_caching == "on",
            )
            max_batched_tokens = (
                args.max_num_batched_tokens or MAX_BATCHED_TOKENS[model.device.type]
            )
            return Target(model, cache, max_batched_tokens=max_batched_tokens)

        num_threads = args.target_num_threads or len(os.sched_getaffinity(0))
        self._start(args, make_target, VERIFY, role="target", num_threads=num_threads)

    async def verify(self, batch: Sequence[VerifyRequest]) -> Reply[VerifyResult]:
        return await self._run_batch(batch)
