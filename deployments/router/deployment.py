"""The ingress deployment: HTTP and gRPC in front of one round loop.

This is a shim. It connects handles, tokenizer and policies, and passes requests on.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster import bundled
from deployments.api.grpc_ingress import GrpcIngress
from deployments.args import AppArgs, HubToken, RouterConfig
from workers.types import WorkerInfo

if TYPE_CHECKING:
    from fastapi import FastAPI

    from deployments.router.drafting.remote import PooledDrafter
    from deployments.router.health import Health
    from deployments.router.loop import RoundLoop
    from deployments.router.service import GenerationService
    from deployments.router.tenants.keys import Keys
    from deployments.router.tokenizer import ChatTokenizer
    from workers.grammar_compiler import GrammarCompiler

logger = logging.getLogger(__name__)


@serve.deployment(max_ongoing_requests=10_000, max_constructor_retry_count=3)
@serve.ingress()
class Router(GrpcIngress):
    """Owns the truth of every request it accepted."""

    async def __init__(  # type: ignore[misc]
        self,
        args: AppArgs,
        target_group: DeploymentHandle[Any],
        draft_pool: DeploymentHandle[Any] | None,
        key_digests: Sequence[bytes],
        hub_token: HubToken,
    ) -> None:
        """`key_digests` are those of API keys that stand in no file."""
        from deployments.router.light_transformers import import_without_torch

        import_without_torch()  # before anything else imports transformers

        from deployments.api.grpc import Rpcs
        from deployments.router.grammars import make_compiler
        from deployments.router.policy.controller import make_controller
        from deployments.router.tokenizer import load_tokenizer

        hub_token.use()
        self._args = args
        self._workers = [worker for worker in (target_group, draft_pool) if worker is not None]
        target_info = await target_group.info.remote()
        pool, draft_info = await self._make_pool(draft_pool)
        draft_steps = () if draft_info is None else draft_info.step_times
        self._steps = {"target_steps": target_info.step_times, "draft_steps": draft_steps}
        self._controllers = {args.gamma: make_controller(args.gamma, **self._steps)}
        tokenizer = await asyncio.to_thread(load_tokenizer, bundled.resolve(args.target_source))
        grammars = make_compiler(tokenizer, target_info)
        grammars.start_loading()
        self._loop = self._make_loop(target_group, target_info, pool, grammars)
        self._service = await self._make_service(
            tokenizer,
            target_info,
            draft_info,
            self._watch(target_group),
            grammars,
            await self._read_keys(key_digests),
        )
        self._rpcs = Rpcs(self._service, max_request_bytes=args.max_request_bytes)

    def _make_loop(
        self,
        target_group: DeploymentHandle[Any],
        target_info: WorkerInfo,
        pool: "PooledDrafter | None",
        grammars: "GrammarCompiler",
    ) -> "RoundLoop":
        from deployments.metrics import RouterMetrics
        from deployments.router.drafting.chain import make_drafters
        from deployments.router.drafting.overlap import make_overlap
        from deployments.router.loop import LoopOptions, RoundLoop
        from deployments.router.speculation import Policies
        from deployments.transport.directory import ServeDirectory
        from deployments.transport.messages import VERIFY
        from deployments.transport.worker_streams import WorkerStreams

        args = self._args
        return RoundLoop(
            targets=WorkerStreams(
                ServeDirectory(target_group), VERIFY, on_new_steps=self._ask_for_steps
            ),
            drafters=make_drafters(args.drafters, pool, grammars),
            policies=Policies(
                gamma=self._controllers[args.gamma],
                overlap=make_overlap(args.overlap),
                max_gamma=args.num_speculative_tokens,
                max_model_len=target_info.max_model_len,
            ),
            observer=RouterMetrics(),
            options=LoopOptions(
                verify_timeout_s=args.verify_timeout_s,
                recovery_timeout_s=args.recovery_timeout_s,
            ),
            clock=time.monotonic,
        )

    async def _make_pool(
        self, draft_pool: DeploymentHandle[Any] | None
    ) -> "tuple[PooledDrafter | None, WorkerInfo | None]":
        """The drafter whose replicas these are, and what one of them is; None without any."""
        from deployments.router.drafting.remote import PooledDrafter
        from deployments.transport.directory import ServeDirectory
        from deployments.transport.messages import PROPOSE
        from deployments.transport.worker_streams import WorkerStreams

        if draft_pool is None:
            return None, None
        info = await draft_pool.info.remote()
        drafter = PooledDrafter(
            WorkerStreams(ServeDirectory(draft_pool), PROPOSE, on_new_steps=self._ask_for_steps),
            timeout_s=self._args.draft_timeout_s,
            max_model_len=info.max_model_len,
        )
        return drafter, info

    async def _read_keys(self, digests: Sequence[bytes]) -> "Keys":
        """The API keys that are let in; their file is read again whenever it changes."""
        from deployments.router.tenants.key_file import load_keys, watch_key_file
        from deployments.router.tenants.keys import Keys

        path = None if self._args.api_keys_file is None else Path(self._args.api_keys_file)
        keys = Keys(await asyncio.to_thread(load_keys, path, digests))
        if path is not None:
            self._watching_keys = asyncio.create_task(watch_key_file(keys, path, digests))
        return keys

    def _ask_for_steps(self) -> None:
        """A worker has measured its steps anew, as it does when a compiled forward takes over."""
        self._asking_for_steps = asyncio.create_task(self._take_new_steps())

    async def _take_new_steps(self) -> None:
        try:
            infos = [await worker.info.remote() for worker in self._workers]
        except Exception as error:  # the tables that are known go on to be used
            logger.warning("the workers' step times are not known anew: %s", error)
            return
        for name, info in zip(self._steps, infos, strict=False):
            self._steps[name] = info.step_times
        for controller in self._controllers.values():
            controller.use_steps(**self._steps)

    def _watch(self, target_group: DeploymentHandle[Any]) -> "Health":
        """Ask the targets for signs of life from now on."""
        from deployments.router.health import Health, watch_targets

        health = Health(
            recovery_timeout_s=self._args.recovery_timeout_s,
            # a target may be silent once before a completion is moved, and once after
            stall_timeout_s=2 * self._args.verify_timeout_s + self._args.recovery_timeout_s,
            clock=time.monotonic,
        )
        asking = watch_targets(health, partial(_ask_for_life, target_group))
        self._watching = asyncio.create_task(asking)
        return health

    async def _make_service(
        self,
        tokenizer: "ChatTokenizer",
        target_info: WorkerInfo,
        draft_info: WorkerInfo | None,
        health: "Health",
        grammars: "GrammarCompiler",
        keys: "Keys",
    ) -> "GenerationService":
        from deployments.api.serve_log import leave_out_told_errors, write_request_log
        from deployments.router.admission import AdmissionLimits
        from deployments.router.chat.template import load_chat_template
        from deployments.router.request_log import LOGGER, RequestLog
        from deployments.router.service import GenerationService, ServedModel
        from workers.end_tokens import find_stop_strings

        args = self._args
        leave_out_told_errors()
        if args.request_log == "on":
            write_request_log(LOGGER)
        return GenerationService(
            ServedModel(
                name=args.model_name,
                aliases=args.model_aliases,
                tokenizer=tokenizer,
                info=target_info,
                draft=draft_info,
                created=int(time.time()),
                chat_template=await load_chat_template(
                    tokenizer,
                    path=args.chat_template,
                    tool_call_parser=args.tool_call_parser,
                    reasoning_parser=args.reasoning_parser,
                ),
                chat_stop=find_stop_strings(bundled.resolve(args.target_source)),
            ),
            self._loop,
            AdmissionLimits(
                max_running=args.max_num_seqs,
                max_waiting=args.max_queued_requests,
                queue_timeout_s=args.queue_timeout_s,
                num_routers=args.num_router_replicas.maximum,
            ),
            health,
            grammars=grammars,
            keys=keys,
            log=RequestLog() if args.request_log == "on" else None,
            verification=args.verification,
        )

    def __serve_build_asgi_app__(self) -> "FastAPI":
        from deployments.api.http import HttpOptions, make_app

        options = HttpOptions(
            max_request_bytes=self._args.max_request_bytes,
            cors_allow_origins=self._args.cors_origins,
        )
        return make_app(self._service, options)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Change options of the running router: Serve calls it with the YAML's `user_config`.

        The only one is `gamma`. Running completions go on with the new value; a dynamic one that
        is returned to still knows what it had learnt.
        """
        from deployments.router.policy.controller import make_controller

        gamma = RouterConfig.model_validate(user_config).gamma
        if gamma not in self._controllers:
            self._controllers[gamma] = make_controller(gamma, **self._steps)
        self._loop.use_gamma(self._controllers[gamma])

    async def num_live(self) -> int:
        """Completions in the round loop."""
        return self._loop.num_live


async def _ask_for_life(target_group: DeploymentHandle[Any]) -> None:
    """Raises whatever keeps every target from answering; does not leave a call behind."""
    response = target_group.options(_by_reference=False).info.remote()
    try:
        await response
    except asyncio.CancelledError:
        response.cancel()  # type: ignore[no-untyped-call]
        raise
