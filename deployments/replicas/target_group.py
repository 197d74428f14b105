"""The target deployment: one replica is one target group."""

import asyncio
from collections.abc import Awaitable
from dataclasses import replace

from ray import serve

from deployments.args import AppArgs, HubToken
from deployments.replicas.target_ranks import OtherRanks
from deployments.replicas.worker_replica import DEPLOYMENT_OPTIONS, WorkerReplica, WorkerStatus
from deployments.transport.messages import VERIFY
from workers.errors import WorkerLostError
from workers.types import VerifyRequest, VerifyResult

LOSS_TIMEOUT_S = 5.0
MAX_BATCHED_TOKENS = {"cpu": 256, "cuda": 2048}


@serve.deployment(**DEPLOYMENT_OPTIONS)
class TargetGroup(WorkerReplica[VerifyRequest, VerifyResult]):
    """Verifies for all routers, over streams; see `Target.verify` for the contract."""

    async def __init__(self, args: AppArgs, hub_token: HubToken) -> None:  # type: ignore[misc]
        # before the imports, which take as long in the ranks
        self._ranks = OtherRanks() if args.tensor_parallel_size > 1 else None
        from deployments.replicas.target_model import check_target, load_target, target_cache
        from workers.model import resolve_device
        from workers.target import Target

        hub_token.use()
        check_target(args)
        if self._ranks is not None:
            self._ranks.load(args, hub_token)
        device_type = resolve_device(args.device).type

        def make_target() -> Target:
            group = self._ranks.join(device_type) if self._ranks is not None else None
            return Target(
                load_target(args),
                target_cache(args),
                max_batched_tokens=args.max_num_batched_tokens or MAX_BATCHED_TOKENS[device_type],
                ranks=group,
                early_exit_layer=args.early_exit_layer,
            )

        starting = self._start(
            args,
            make_target,
            VERIFY,
            role="target",
            can_compile=self._ranks is None,  # what ranks exchange is no part of a graph
        )
        if self._ranks is None:
            await starting
        else:
            await self._start_with_ranks(starting, self._ranks)

    async def _start_with_ranks(self, starting: Awaitable[None], ranks: OtherRanks) -> None:
        """Raises what keeps a rank from starting; the others would wait for it."""
        loss = asyncio.ensure_future(ranks.wait_for_loss())
        started = asyncio.ensure_future(starting)
        await asyncio.wait([loss, started], return_when=asyncio.FIRST_COMPLETED)
        if started.done() and started.exception() is not None:
            await asyncio.wait([loss], timeout=LOSS_TIMEOUT_S)  # it may be what made this one fail
        if loss.done():
            raise loss.result()
        await started
        loss.add_done_callback(lambda lost: self._end(str(lost.result())))

    async def status(self) -> WorkerStatus:
        status = await super().status()
        if self._ranks is None:
            return status
        return replace(status, rank_pids=await self._ranks.check())

    async def check_health(self) -> None:  # type: ignore[override]
        """Check the worker, and end a group with a rank that hangs at once."""
        super().check_health()
        if self._ranks is not None:
            try:
                await self._ranks.check()
            except WorkerLostError as error:
                self._end(str(error))
